"""What the coordinator machine knows, as frozen values.

`CoordinatorState` is never changed in place: a step makes a draft of it (`coordinator_draft`). Times are seconds of the
coordinator's own clock, less its own pauses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from atoll.membership.leases import Reads, SlotTable
from atoll.membership.messages import CatchUp, Ready, Scalar, Verdict, Vote
from atoll.membership.rates import Rates
from atoll.membership.recollection import Recollection
from atoll.membership.settings import CoordinatorSettings
from atoll.membership.ways import Ways
from atoll.values import Edge, ParameterInfo, Plan, RankInfo

Layout = dict[str, ParameterInfo]

_VERSIONS_REMEMBERED = 64


class CatchingUp(msgspec.Struct, frozen=True):
    """A peer that declared, and does not hold the newest version.

    `version`, `round` and `digest` are of the state it holds; `trusted` if its bits may be the run's. `slots` is the
    table of data slots that it has of this version, `told` the order it got last.
    """

    version: int
    round: int
    digest: str
    since_s: float
    trusted: bool = True
    wants_snapshot: bool = False
    why: str = ""
    slots: SlotTable | None = None
    told: CatchUp | None = None


class PeerRecord(msgspec.Struct, frozen=True):
    """One peer as the coordinator sees it; one that a restarted coordinator waits for has no incarnation yet.

    `digest` is what it reported for the newest version, "" while it has not. `moved_s` is when it last made
    progress. `joined_round` is the round that was open when it became a member of a run under way. `differed` is how
    often its bits were not the run's, `served` the version that its sidecar was last woken for, and whether to stage.
    `met_before` if this process was connected to this coordinator before: then it has the term from it.
    What its heartbeats say: `step`, `phase`, and how far it is in its round. `leaving` is why it was asked to leave,
    "" while it was not; `wish` is how many data slots it wishes to hold,
    `own_data` the digest of data that it reads alone.
    """

    peer: str
    incarnation: str
    heard_s: float
    connected: bool = True
    dropped_s: float = 0.0
    member: bool = False
    ranks: tuple[RankInfo, ...] = ()
    digest: str = ""
    step: int = 0
    moved_s: float = 0.0
    ready: Ready | None = None
    catching_up: CatchingUp | None = None
    joined_round: int = 0
    differed: int = 0
    served: tuple[int, bool] = (-1, False)
    met_before: bool = False
    phase: str = ""
    steps_in_round: int = 0
    round_steps: int = 0
    leaving: str = ""
    wish: int = 0
    own_data: str = ""


class Attempt(msgspec.Struct, frozen=True):
    """One try at the open round. `failed` says why it cannot be committed any more; "" while it still can.

    `incarnations` are the processes that were planned: another process under the same id does not count. `reads` is
    what each of them has read, `unleased` who read what is not leased to it.
    """

    plan: Plan
    incarnations: dict[str, str]
    left_out: dict[str, str]
    norms: tuple[float, ...]
    due_s: float
    votes: dict[str, Vote] = {}
    failed: str = ""
    reads: dict[str, Reads] = {}
    unleased: tuple[str, ...] = ()


class OpenRound(msgspec.Struct, frozen=True):
    """The round that has no verdict yet, and what was tried.

    `first_ready_s`, `quorum_s` and `closed_s` are when a first member was ready, enough of them were, and the
    others were asked to freeze. `broken` are links that failed in this round; `links_forgiven` once they were
    tried again although no lane avoided them; `results_differed` once the members' results did. `previous` is
    the plan of the last attempt.
    """

    number: int
    first_ready_s: float | None = None
    quorum_s: float | None = None
    closed_s: float | None = None
    attempts: int = 0
    attempt: Attempt | None = None
    broken: frozenset[Edge] = frozenset()
    links_forgiven: bool = False
    results_differed: bool = False
    previous: Plan | None = None


class Gone(msgspec.Struct, frozen=True):
    """A process that was a member. `fenced`: a newer process has its name, so it has no voice any more."""

    process: tuple[str, str]
    fenced: bool


class KnownVersion(msgspec.Struct, frozen=True):
    """A version, the round that made it, and its state's digest."""

    version: int
    round: int
    digest: str


class Eviction(msgspec.Struct, frozen=True):
    """A peer id that an operator shut out, until `until_s` (infinity: until the run ends)."""

    reason: str
    until_s: float


class CoordinatorState(msgspec.Struct, frozen=True):
    """Everything the coordinator machine knows. `peers` is in the order of joining, oldest first.

    `digest` is the agreed digest of the newest version's state, "" until the members reported it; `known` are the
    last versions that have one. `learning` while the journal may be short of what the peers know; `decided_term`
    is that of the last plan or roll-back in it when this coordinator started; `met` are the processes that came
    while it was learning; until `relearns_until_s` peers are waited for that may know more. `commit` is the last
    committed verdict, `verdict` the last of any outcome. `norms` are the medians of the last committed rounds,
    `offences` the rounds in which peers' updates were refused, `rates` what the links were seen to carry, `probed`
    the members whose links were asked for. `ways` is who can dial whom, `dialled` the processes (by peer) that were
    asked, `dials_due_s` until when those that have not answered are waited for; at `dial_again_s` pairs without an
    edge are asked about again, and `told_edges` are those, and those that go one way, as told last.
    `done` if the last member to go had all it was asked for. `diverging_rounds` is how many of the last rounds in a row
    had no finite update. `short_since_s` is since when
    there are too few members, `no_holder_since_s` since when nobody who is here holds the newest version.
    `saved_at_s` is the run's age at its last checkpoint. `stopping` says why the open round is to be the last, ""
    while it is not; `evictions` are by peer id. `slots` are the positions in the data and the leases, None if nothing
    is leased; `tables` those of the last commits; `returning` are peers that hold leases and are gone;
    `old_positions` while `slots` are those of an older version, for want of better. `over` says why the run ended, ""
    while it goes on. `recollection` decides nothing.
    """

    settings: CoordinatorSettings
    term: int
    session_key: bytes
    begun_s: float
    last_s: float
    paused_s: float = 0.0
    peers: dict[str, PeerRecord] = {}
    round: OpenRound = OpenRound(number=1)
    version: int = 0
    digest: str = ""
    known: tuple[KnownVersion, ...] = ()
    learning: bool = True
    decided_term: int = 0
    met: tuple[tuple[str, str], ...] = ()
    relearns_until_s: float | None = None
    no_holder_since_s: float | None = None
    layout: Layout | None = None
    run_settings: dict[str, Scalar] | None = None
    commit: Verdict | None = None
    verdict: Verdict | None = None
    norms: tuple[float, ...] = ()
    offences: Mapping[str, tuple[int, ...]] = {}
    rates: Rates = {}
    probed: frozenset[str] = frozenset()
    ways: Ways = {}
    dialled: dict[str, str] = {}
    dials_due_s: dict[str, float] = {}
    dial_again_s: float = 0.0
    told_edges: tuple[tuple[Edge, ...], tuple[Edge, ...]] = ((), ())
    started: bool = False
    done: bool = False
    diverging_rounds: int = 0
    elapsed_before_s: float = 0.0
    saved_at_s: float = 0.0
    short_since_s: float | None = None
    gone: tuple[Gone, ...] = ()
    stopping: str = ""
    evictions: dict[str, Eviction] = {}
    slots: SlotTable | None = None
    tables: tuple[SlotTable, ...] = ()
    returning: tuple[str, ...] = ()
    old_positions: bool = False
    over: str = ""
    recollection: Recollection = Recollection()

    def digests(self) -> dict[int, str]:
        return {each.version: each.digest for each in self.known}

    def members(self) -> tuple[PeerRecord, ...]:
        """The living members, oldest first; those that a restarted coordinator still waits for included."""
        return _members_of(self.peers)

    def is_fenced(self, peer: str, incarnation: str) -> bool:
        """Whether a newer process has this peer's id: the old one is not to be let in again."""
        return any(gone.fenced and gone.process == (peer, incarnation) for gone in self.gone)

    def eviction(self, peer: str, now_s: float) -> str:
        """Why this id is shut out at `now_s`, in a sentence; "" if it is not."""
        found = self.evictions.get(peer)
        if found is None or now_s >= found.until_s:
            return ""
        left_s = found.until_s - now_s
        how_long = "until the run ends" if math.isinf(left_s) else f"for another {max(1, round(left_s))} s"
        return f"{peer!r} was evicted and is refused {how_long}: {found.reason}"

    def ending(self) -> bool:
        """Whether the last verdict was the run's last."""
        return self.verdict is not None and self.verdict.ends


_last_members: tuple[dict[str, PeerRecord], tuple[PeerRecord, ...]] = ({}, ())


def _members_of(peers: dict[str, PeerRecord]) -> tuple[PeerRecord, ...]:
    """A step asks again and again; with a thousand peers that is most of its time. These dicts never change, so the
    last answer holds for the very same one."""
    global _last_members
    asked, found = _last_members
    if asked is not peers:
        found = tuple(record for record in peers.values() if record.member)
        _last_members = (peers, found)
    return found


def remember(
    known: tuple[KnownVersion, ...], version: int, round_: int, digest: str
) -> tuple[KnownVersion, ...]:
    """`known` with one more; what was known of this or a later version before counts no more."""
    older = tuple(each for each in known if each.version < version)
    return (*older, KnownVersion(version, round_, digest))[-_VERSIONS_REMEMBERED:]


def ids(records: tuple[PeerRecord, ...]) -> tuple[str, ...]:
    return tuple(record.peer for record in records)


def listed(names: Iterable[str]) -> str:
    """Names in one phrase, "nobody" if there is none."""
    return ", ".join(sorted(names)) or "nobody"


def majority(values: Iterable[str]) -> str:
    """The most frequent value; of equally frequent ones, the first."""
    return Counter(values).most_common(1)[0][0]


def counted(number: int, noun: str) -> str:
    """ "1 member", "2 members"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
