"""A peer's half of the protocol, as a pure machine: (state, event, now) -> (state, effects, reason).

A peer trains only in LOCAL. From its `ready` on it waits, whatever happens to the connection, until it is
told the round's verdict: it repeats what it said after every reconnect, obeys a newer attempt at the same
round, and obeys one verdict once. It steps only on a committed verdict for the result that it holds and voted
yes for. If the run went on without it, it is told to catch up; it drops what it was doing, fetches what it
lacks, says what it holds, and is in LOCAL again once a view names it. While it waits it gives a lost
coordinator `coordinator_lost_s`; in LOCAL it goes on training and waits at the next `ready`.

    CONNECTING -> DECLARING -> LOCAL -> READY -> REDUCING -> VOTED -> APPLYING -> LOCAL ...     OVER
                                 ^ ---- CATCHING_UP <- from any of these
"""

from __future__ import annotations

from msgspec.structs import replace

from atoll.membership import member_orders, member_reports
from atoll.membership.member_outcome import Outcome, declaration_of, fail, outcome, send
from atoll.membership.member_state import WAITING, MemberState, Phase
from atoll.membership.settings import Timeouts
from atoll.membership.steps import (
    AbortAttempt,
    Connected,
    CoordinatorSaid,
    Disconnected,
    Effect,
    MemberEvent,
    Tick,
    TrainerSaid,
)

__all__ = ["MemberState", "Phase", "start", "step"]


def start(peer: str, timeouts: Timeouts, now_s: float) -> Outcome:
    """A process that has not declared yet. `timeouts` are the coordinator's."""
    return outcome(MemberState(peer=peer, timeouts=timeouts, last_s=now_s, heard_s=now_s), f"{peer} begins")


def step(state: MemberState, event: MemberEvent, now_s: float) -> Outcome:
    """Take in one event at `now_s` (monotonic seconds). Asserts that the trainer keeps to the phases."""
    if state.phase is Phase.OVER:
        return outcome(state, f"{state.peer} has left the run")
    state = _pass_time(state, now_s)
    match event:
        case Tick():
            return _tick(state, now_s)
        case Connected(term=term):
            return _connect(replace(state, connected=True, heard_s=now_s), term)
        case Disconnected():
            return outcome(replace(state, connected=False), f"the connection is lost in phase {state.phase}")
        case CoordinatorSaid(message=message):
            return member_orders.hear(replace(state, heard_s=now_s), message)
        case TrainerSaid(message=message):
            return member_reports.say(state, message)


# ---- time and the connection -----------------------------------------------------------------------------


def _pass_time(state: MemberState, now_s: float) -> MemberState:
    """A silence longer than a heartbeat is our own pause (ticks come faster); it is not the coordinator's."""
    gap_s = now_s - state.last_s
    paused_s = gap_s if gap_s > state.timeouts.heartbeat_s else 0.0
    return replace(state, last_s=now_s, heard_s=state.heard_s + paused_s)


def _tick(state: MemberState, now_s: float) -> Outcome:
    silent_s = now_s - state.heard_s
    if state.phase not in WAITING or silent_s < state.timeouts.coordinator_lost_s:
        return outcome(state, f"{state.peer} is in phase {state.phase}, version {state.version}")
    reason = (
        f"nothing was heard from the coordinator for coordinator_lost_s = "
        f"{state.timeouts.coordinator_lost_s:g} s while {state.peer} waited in phase {state.phase} "
        f"(round {state.round + 1}, version {state.version}); "
        "check that the coordinator runs and can be reached, then start this peer again"
    )
    return fail(state, "unreachable", reason)


def _connect(state: MemberState, term: int) -> Outcome:
    """Say again what a coordinator may not have heard. Under a new term the attempt under way is dead."""
    aborts: tuple[Effect, ...] = ()
    if term > state.term and state.phase is Phase.REDUCING:
        aborts = (AbortAttempt(state.op, f"the coordinator started again (term {term})"),)
        state = replace(state, phase=Phase.READY)
    declaration = declaration_of(state) if state.declare else None
    state = replace(state, term=max(term, state.term))
    if declaration is None:
        return outcome(state, f"connected to the coordinator, term {state.term}", *aborts)
    said = send(state, declaration)
    if state.vote is not None and state.vote.op.term == state.term:
        said += send(state, state.vote)
    if state.wanted is not None:
        said += send(state, state.wanted)
    what = (
        f"waits for the verdict of round {state.pending.round}"
        if state.pending
        else f"is in phase {state.phase}"
    )
    return outcome(
        state, f"connected, term {state.term}: {state.peer} declares again and {what}", *aborts, *said
    )
