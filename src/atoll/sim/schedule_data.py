"""The data of a schedule: a text of a few short slots, a peer's reader, and what the invariants know of both."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from atoll import events
from atoll.membership import leases, leasing
from atoll.membership.coordinator_state import CoordinatorState
from atoll.membership.leases import Lease, Position, Read, Reads, SlotTable
from atoll.membership.messages import Ready, Verdict
from atoll.membership.steps import (
    CloseConnection,
    Effect,
    Emit,
    Journal,
    LeasesChanged,
    VerdictMade,
    VersionLearned,
)

LENGTHS = (5, 3, 8, 1, 4, 6, 2, 7, 3, 5)
MOST_READ = 9


def step_on(slot: int, position: Position, tokens: int) -> Position:
    epoch, at = position
    at += tokens
    return epoch + at // LENGTHS[slot], at % LENGTHS[slot]


class VirtualReader:
    """Reads what is leased; what it has read is only a position in each slot."""

    def __init__(self, peer: str, rng: random.Random) -> None:
        self._peer, self._rng = peer, rng
        self.slots: SlotTable | None = None
        self._held: dict[int, Lease] = {}
        self._at: dict[int, Position] = {}
        self.wish = rng.randint(1, 4)

    def begin(self) -> None:
        self._held, self._at = {}, {}
        self.go_on()

    def go_on(self) -> None:
        before, at = self._held, self._at
        self._held = {lease.slot: lease for lease in (self.slots.held(self._peer) if self.slots else ())}
        self._at = {
            slot: at[slot] if before.get(slot) == lease else (lease.epoch, lease.at)
            for slot, lease in self._held.items()
        }

    def is_unbroken(self) -> bool:
        return self.slots is not None and not leases.broken(self.slots, {self._peer: self.reads()})

    def is_dry(self) -> bool:
        return all(self._at[slot][0] > lease.epoch for slot, lease in self._held.items())

    def read(self) -> bool:
        """Read some tokens, beyond the end of the epoch if nothing else is there; False if nothing is held."""
        for slot in self._held:
            if self._rng.random() < 0.6:
                self._at[slot] = step_on(slot, self._at[slot], self._rng.randint(0, MOST_READ))
        return bool(self._held)

    def reads(self) -> Reads:
        found = [Read(slot, (lease.epoch, lease.at), self._at[slot]) for slot, lease in self._held.items()]
        return tuple(read for read in found if read.start != read.end)


class SlotHistory:
    """Where every slot stands by what was committed, as the peers really said it. `require` raises for what must not
    be."""

    def __init__(self, require: Callable[[bool, str], None]) -> None:
        self._require = require
        self._truth = _unread()
        self._ever: dict[tuple[int, int], list[dict[int, Position]]] = {(0, 0): [_unread()]}
        self._table: SlotTable | None = None
        self._forgotten = self._told_old = self._told_forgotten = False

    def lost(self) -> None:
        """The journal is; a new coordinator begins with nothing."""
        self._truth, self._table = _unread(), None
        self._forgotten = self._told_forgotten = False

    def check_step(self, effects: Sequence[Effect], after: CoordinatorState) -> None:
        """The table that the coordinator goes by is the journaled one, and who is gone holds nothing."""
        table = self._table
        self._told_old = False
        for effect in effects:
            match effect:
                case Emit(event=events.OldPositionsUsed()):
                    self._told_old = self._told_forgotten = True
                case Journal(record=LeasesChanged() as record):
                    table = leasing.changed(table, record)
                case Journal(record=VerdictMade(verdict=verdict)):
                    table = verdict.slots
                case Journal(record=VersionLearned(slots=slots)):
                    table = slots
        held = {} if after.slots is None else after.slots.leases
        self._require(held == ({} if table is None else table.leases), "leases are not the journaled ones")
        learning = after.relearns_until_s is not None
        attempt = after.round.attempt
        # A stranger's late word, the first that a restarted coordinator hears, decides nothing yet.
        decided = not all(isinstance(effect, CloseConnection) for effect in effects)
        if (
            decided
            and after.started
            and not learning
            and not after.over
            and (attempt is None or attempt.failed)
        ):
            gone = sorted(held.keys() - after.peers.keys())
            self._require(not gone, f"{', '.join(gone)} is gone and still holds data slots")

    def changed(self, record: LeasesChanged) -> None:
        self._take(leasing.changed(self._table, record))

    def learned(self, record: VersionLearned) -> None:
        """The run goes on from what was known of this version; from anything else only if it says so."""
        self._table, slots = None, record.slots
        if slots is None:
            self._forgotten = True
            return
        stands = _positions(slots)
        known = self._ever.get((record.version, record.round), [])
        self._require(
            stands in known or self._told_old,
            f"the data of version {record.version} is read on from other positions than its own",
        )
        self._truth, self._forgotten = stands, False
        self._remember(record.version, record.round)
        self._take(slots)

    def concluded(self, verdict: Verdict, readies: dict[str, Ready]) -> None:
        """`readies`: what each of the round's members was really ready with."""
        if verdict.slots is None:
            return
        self._forget_if_told()
        counted = {each.peer for each in verdict.contributions}
        stands = _positions(verdict.slots)
        for peer, ready in sorted(readies.items(), key=lambda each: each[0] not in counted):
            for read in ready.reads:
                here = self._truth[read.slot]
                if peer in counted:
                    where = f"{peer} read data slot {read.slot} from {read.start} in {verdict.op}"
                    self._require(here == read.start, f"{where}, it stands at {here}: lost or read twice")
                    self._truth[read.slot] = read.end
                elif here == read.start and stands[read.slot] == read.end:
                    self._truth[read.slot] = read.end  # dropped
        self._take(verdict.slots)
        self._remember(verdict.version, verdict.op.round)

    def _take(self, table: SlotTable) -> None:
        self._forget_if_told()
        named = [each.slot for held in (*table.leases.values(), table.pool) for each in held]
        twice = [slot for slot, count in Counter(named).items() if count > 1]
        self._require(not twice, f"data slots {twice} are two peers' at once")
        stands = _positions(table)
        wrong = {slot: at for slot, at in stands.items() if at != self._truth[slot]}
        self._require(not wrong, f"data slots are said to stand at {wrong}, which is not what was committed")
        self._table = table

    def _remember(self, version: int, round_: int) -> None:
        self._ever.setdefault((version, round_), []).append(dict(self._truth))

    def _forget_if_told(self) -> None:
        """Nobody told the positions of the version that was learned: all is read from the start."""
        if self._forgotten:
            self._require(self._told_forgotten, "the data is read from its start, and nobody is told")
            self._truth, self._forgotten = _unread(), False


def _unread() -> dict[int, Position]:
    return dict.fromkeys(range(len(LENGTHS)), (0, 0))


def _positions(table: SlotTable) -> dict[int, Position]:
    return {slot: leases.position(table, slot) for slot in range(table.count)}
