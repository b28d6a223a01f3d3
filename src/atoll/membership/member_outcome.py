"""What the parts of the member machine share: how a step ends, and what a peer declares of what it holds. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from atoll.membership.leases import SlotTable
from atoll.membership.member_state import MemberState, Phase
from atoll.membership.messages import Declare, Message
from atoll.membership.steps import AbortAttempt, Effect, Fail, Send, Step

Outcome = Step[MemberState]


def outcome(state: MemberState, reason: str, *effects: Effect) -> Outcome:
    return Step(state, effects, reason)


def send(state: MemberState, message: Message) -> tuple[Effect, ...]:
    """Without a connection nothing is sent: everything is said again after the next one is made."""
    return (Send("", message),) if state.connected else ()


def fail(state: MemberState, kind: str, reason: str) -> Outcome:
    aborts = (AbortAttempt(state.op, reason),) if state.phase is Phase.REDUCING else ()
    return outcome(replace(state, phase=Phase.OVER), reason, *aborts, Fail(kind, reason))


def declaration_of(state: MemberState) -> Declare:
    assert state.declare is not None
    return replace(
        state.declare,
        version=state.version,
        round=state.round,
        digest=state.digest,
        pending=state.pending,
        term=state.term,
        version_term=state.version_term,
        applying=state.applying is not None,
        slots=state.slots,
        leases=state.told.held(state.peer) if state.told is not None else (),
    )


def of_version(version: int, *tables: SlotTable | None) -> SlotTable | None:
    """The newest of these that is of this version."""
    known = [table for table in tables if table is not None and table.version == version]
    return max(known, key=lambda table: table.stamp, default=None)
