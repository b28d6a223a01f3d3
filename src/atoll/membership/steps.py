"""What the two protocol machines hear, and what they want done.

Both are pure: `step(state, event, now_s) -> Step(state, effects, reason)`. Whoever runs a machine (server,
client, or a simulated schedule) carries out the effects in order. `reason` is a full sentence: logged, shown,
asserted in tests.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from atoll import events
from atoll.membership.messages import CoordinatorMessage, Message, PeerMessage, Verdict
from atoll.values import OpId, Plan

State = TypeVar("State")


class Step(msgspec.Struct, Generic[State], frozen=True):
    state: State
    effects: tuple[Effect, ...]
    reason: str


# ---- heard by the coordinator machine (the token was already proved; strangers never get this far) -------


class PeerArrived(msgspec.Struct, frozen=True):
    """A connection proved the token for this peer id.

    `incarnation` is new for every process; an older process under the same id is fenced.
    """

    peer: str
    incarnation: str
    address: str


class PeerSaid(msgspec.Struct, frozen=True):
    peer: str
    incarnation: str
    message: PeerMessage


class PeerDropped(msgspec.Struct, frozen=True):
    """The connection closed. The peer may come back with the same incarnation within `dead_s`."""

    peer: str
    incarnation: str


class Tick(msgspec.Struct, frozen=True):
    """Time has passed. Given at least every half `heartbeat_s`; a longer silence counts as our own pause."""


CoordinatorEvent = PeerArrived | PeerSaid | PeerDropped | Tick


# ---- heard by the member machine -------------------------------------------------------------------------


class Connected(msgspec.Struct, frozen=True):
    """The token was proved both ways on a new connection to a coordinator of this term."""

    term: int


class Disconnected(msgspec.Struct, frozen=True):
    pass


class CoordinatorSaid(msgspec.Struct, frozen=True):
    message: CoordinatorMessage


class TrainerSaid(msgspec.Struct, frozen=True):
    """The training thread speaks: Declare, Ready, Vote, Applied or Leave, in that message's own form."""

    message: PeerMessage


MemberEvent = Connected | Disconnected | CoordinatorSaid | TrainerSaid | Tick


# ---- wanted by either ------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    """Send to the peer (from the coordinator), or to the coordinator (`peer` is "")."""

    peer: str
    message: Message


class Journal(msgspec.Struct, frozen=True):
    """Write and sync this record before any later effect of the same step is carried out."""

    record: JournalRecord


class Emit(msgspec.Struct, frozen=True):
    event: events.Event


class CloseConnection(msgspec.Struct, frozen=True):
    """Close once all that was sent before is out. From a member (`peer` is "") it means: connect anew."""

    peer: str
    incarnation: str


class Finish(msgspec.Struct, frozen=True):
    """The coordinator's work is over."""

    reason: str
    exit_code: int


class Order(msgspec.Struct, frozen=True):
    """To the training thread: start this attempt, or obey this verdict."""

    order: Plan | Verdict


class AbortAttempt(msgspec.Struct, frozen=True):
    """To the engine, at once, from the client's thread."""

    op: OpId
    reason: str


class RequestFreeze(msgspec.Struct, frozen=True):
    """To the training thread: end the round at the next safe point."""

    round: int


class Fail(msgspec.Struct, frozen=True):
    """To the training thread: membership ended.

    `kind` is refused, unreachable, quorum, left_out, diverged or ended.
    """

    kind: str
    reason: str


Effect = Send | Journal | Emit | CloseConnection | Finish | Order | AbortAttempt | RequestFreeze | Fail


# ---- the journal -----------------------------------------------------------------------------------------


class TermRaised(msgspec.Struct, frozen=True, tag=True):
    term: int
    session_key: bytes


class RunDefined(msgspec.Struct, frozen=True, tag=True):
    """The first declaration of the run: what every later one is compared with."""

    layout: tuple[tuple[str, tuple[int, ...], str], ...]
    settings: dict[str, str | int | float | bool | None]
    digest: str
    members: tuple[str, ...]


class PlanMade(msgspec.Struct, frozen=True, tag=True):
    op: OpId
    members: tuple[str, ...]
    contributors: tuple[str, ...]


class MembersChanged(msgspec.Struct, frozen=True, tag=True):
    """Who is a member from now on (oldest first): whom a restarted coordinator waits for.

    `started` once the run had all `start_peers`; `done` if the last member to go had all it was asked for
    committed.
    """

    members: tuple[str, ...]
    started: bool
    done: bool


class VerdictMade(msgspec.Struct, frozen=True, tag=True):
    """A round's end. `norms` are its contributors' update norms, `elapsed_s` is the run's age.

    `diverging_rounds` is how many rounds in a row, this one included, were skipped because no update was
    finite.
    """

    verdict: Verdict
    norms: tuple[float, ...]
    elapsed_s: float = 0.0
    diverging_rounds: int = 0


class StateDigest(msgspec.Struct, frozen=True, tag=True):
    """The digest that members reported after applying a version: what a later `Ready` is held against."""

    version: int
    digest: str


JournalRecord = TermRaised | RunDefined | MembersChanged | PlanMade | VerdictMade | StateDigest
