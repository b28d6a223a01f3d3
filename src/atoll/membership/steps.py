"""What the two protocol machines hear, and what they want done.

Both are pure: `step(state, event, now_s) -> Step(state, effects, reason)`. Whoever runs a machine (server,
client, or a simulated schedule) carries out the effects in order. `reason` is a full sentence: logged, shown,
asserted in tests.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from atoll import events
from atoll.membership.leases import SlotTable
from atoll.membership.messages import CatchUp, CoordinatorMessage, Message, PeerMessage, Probe, Reach, Verdict
from atoll.membership.operator import Done, OperatorOrder
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


class OperatorSaid(msgspec.Struct, frozen=True):
    """A person, or a script, proved the token and asks for something. `ticket` names the Answer to it. `spare_key` is
    a session key that the run may go on with if this shuts somebody out; b"": there is none. `certified`: the peer that
    it is about has a certificate, whether or not it was ever here."""

    ticket: int
    request: OperatorOrder
    spare_key: bytes = b""
    certified: bool = False

    def __repr__(self) -> str:
        return f"OperatorSaid({self.ticket}, {self.request})"


CoordinatorEvent = PeerArrived | PeerSaid | PeerDropped | OperatorSaid | Tick


# ---- heard by the member machine -------------------------------------------------------------------------


class Connected(msgspec.Struct, frozen=True):
    """The token was proved both ways on a new connection to a coordinator of this term."""

    term: int


class Disconnected(msgspec.Struct, frozen=True):
    pass


class CoordinatorSaid(msgspec.Struct, frozen=True):
    message: CoordinatorMessage


class TrainerSaid(msgspec.Struct, frozen=True):
    """The training thread speaks: Declare, Ready, Vote, Applied, SlotsWanted, SnapshotWanted, CaughtUp or Leave, in
    that message's own form.
    """

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


class Answer(msgspec.Struct, frozen=True):
    """To the operator who asked under this ticket."""

    ticket: int
    reply: Done


class Order(msgspec.Struct, frozen=True):
    """To the training thread: start this attempt, obey this verdict, or catch up: then nothing but `CaughtUp` (or
    `Leave`) is expected of it. A newer CatchUp takes an older one's place.
    """

    order: Plan | Verdict | CatchUp


class ServeOthers(msgspec.Struct, frozen=True):
    """Let this peer's sidecar serve. With `stage`, the training thread is to stage a snapshot of this version, or of a
    newer one, at its next safe point.
    """

    version: int
    stage: bool


class MeasureLinks(msgspec.Struct, frozen=True):
    """To the prober: it answers with `Probed`, or `Reached`."""

    order: Probe | Reach


class TellLeases(msgspec.Struct, frozen=True):
    """To the training thread: the newest table of data slots. `answers` is the number of the SlotsWanted it answers."""

    slots: SlotTable
    answers: int = 0


class Resume(msgspec.Struct, frozen=True):
    """To the training thread: this peer is a member (again), and may train."""


class AbortAttempt(msgspec.Struct, frozen=True):
    """To the engine, at once, from the client's thread."""

    op: OpId
    reason: str


class RequestFreeze(msgspec.Struct, frozen=True):
    """To the training thread: end the round at the next safe point."""

    round: int


class RequestLeave(msgspec.Struct, frozen=True):
    """To the training thread: say goodbye at the next safe point."""

    reason: str


class Fail(msgspec.Struct, frozen=True):
    """To the training thread: membership ended.

    `kind` is refused, unreachable, quorum, left_out, diverged, dismissed or ended.
    """

    kind: str
    reason: str


Effect = (
    Send
    | Journal
    | Emit
    | CloseConnection
    | Finish
    | Answer
    | Order
    | TellLeases
    | Resume
    | ServeOthers
    | MeasureLinks
    | AbortAttempt
    | RequestFreeze
    | RequestLeave
    | Fail
)


# ---- the journal -----------------------------------------------------------------------------------------


class TermRaised(msgspec.Struct, frozen=True, tag=True):
    term: int
    session_key: bytes

    def __repr__(self) -> str:
        return f"TermRaised({self.term})"


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


class VersionLearned(msgspec.Struct, frozen=True, tag=True):
    """The run stands at this version, whatever the journal says before: it was lost and learned from the peers, or
    nobody holds a newer one any more: then the run was `rolled_back`. `digest` "" is not known yet; `slots` are the
    positions in the data from which it goes on.
    """

    version: int
    round: int
    digest: str
    why: str
    rolled_back: bool = False
    slots: SlotTable | None = None


class LeasesChanged(msgspec.Struct, frozen=True, tag=True):
    """Within a round, data slots were leased or came back. `slots` names the leases of the peers concerned alone:
    nobody else's changed, and who is in `returned` holds none any more."""

    slots: SlotTable
    returned: tuple[str, ...] = ()


class StopDecided(msgspec.Struct, frozen=True, tag=True):
    """An operator stopped the run: the round that is open now is its last."""

    reason: str


class EvictionDecided(msgspec.Struct, frozen=True, tag=True):
    """An operator shut a peer id out, for `for_s` seconds (0: until the run ends). A restarted coordinator counts
    them anew. `session_key` is the key that the others go on with; b"": the one they have.
    """

    peer: str
    reason: str
    for_s: float
    session_key: bytes = b""

    def __repr__(self) -> str:
        return f"EvictionDecided({self.peer!r}, {self.reason!r}, {self.for_s:g})"


class TokenMade(msgspec.Struct, frozen=True, tag=True):
    """A token that lets in whoever proves `key`, until `expires_unix_s` by the coordinator's clock (0: for ever)."""

    id: str
    scope: str
    key: bytes
    expires_unix_s: float
    note: str

    def __repr__(self) -> str:
        return f"TokenMade({self.id}, {self.scope})"


class TokenRevoked(msgspec.Struct, frozen=True, tag=True):
    id: str


class Certified(msgspec.Struct, frozen=True, tag=True):
    """The authority gave a certificate to a peer that came by this token."""

    serial: str
    peer: str
    token: str
    made_unix_s: float


JournalRecord = (
    TermRaised
    | RunDefined
    | MembersChanged
    | PlanMade
    | VerdictMade
    | StateDigest
    | VersionLearned
    | LeasesChanged
    | StopDecided
    | EvictionDecided
    | TokenMade
    | TokenRevoked
    | Certified
)
