"""Who reads which slots of the training text: a table, and the pure functions that change it.

The text is cut into `count` slots. A slot's *position* is (epoch, tokens read in it), as of the last committed round;
the end of one epoch is the start of the next. A *lease* gives one peer the right to read a slot on from its position,
nobody else meanwhile. What it reads counts once it is committed; work that is lost leaves the position where it was.

Each epoch has an order of its own, by the seed. Slots are leased in that order; those that came back partly read go
first. An epoch ends where its order does: then slots of the next one are leased, but a slot only once it is wholly
committed in the one before. Peers may so be in two epochs at once, and still every slot is read once in each.

The table is small: it names the slots that are leased (`leases`) or came back (`pool`), and how far the order was
dealt. Every other slot is unread in `epoch` if it stands beyond `dealt` in the order, and read if before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from atoll.shuffle import shuffled

Position = tuple[int, int]
"""(epoch, tokens read in it)."""
_EPOCHS = 1  # what a shuffle orders; documents have another number


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """A slot, and its position when it was leased, or last committed."""

    slot: int
    epoch: int = 0
    at: int = 0


class Read(msgspec.Struct, frozen=True, array_like=True):
    """What a peer read of one slot, from one position to another."""

    slot: int
    start: Position
    end: Position


Reads = tuple[Read, ...]


class SlotTable(msgspec.Struct, frozen=True, omit_defaults=True):
    """Positions and leases as of `version`. `stamp` (term, number) rises with every change; `epoch` is the one that
    slots are leased from, `dealt` how many of its order were leased or passed over."""

    count: int
    seed: int
    stamp: tuple[int, int] = (0, 0)
    version: int = 0
    epoch: int = 0
    dealt: int = 0
    pool: tuple[Lease, ...] = ()
    leases: dict[str, tuple[Lease, ...]] = {}

    def held(self, peer: str) -> tuple[Lease, ...]:
        """What `peer` holds, in the order in which it is to be read."""
        return self.leases.get(peer, ())


def position(table: SlotTable, slot: int) -> Position:
    """Where `slot` stands."""
    for lease in (*table.pool, *(each for held in table.leases.values() for each in held)):
        if lease.slot == slot:
            return lease.epoch, lease.at
    return _unnamed(table, slot)


def unread(table: SlotTable) -> int:
    """How many slots of the epoch are neither leased nor read."""
    named = {lease.slot for lease in table.pool}.union(
        each.slot for held in table.leases.values() for each in held
    )
    rest = order(table.count, table.seed, table.epoch)[table.dealt :]
    return sum(slot not in named for slot in rest) + sum(each.epoch <= table.epoch for each in table.pool)


def contradiction(table: SlotTable, count: int) -> str:
    """Why a table that somebody told can not be that of a text of `count` slots; "" if it can."""
    named = [*table.pool, *(each for held in table.leases.values() for each in held)]
    if table.count != count:
        return f"it counts {table.count} slots, the text has {count}"
    if any(not 0 <= lease.slot < count for lease in named):
        return f"it names a slot that is none of the {count}"
    if len({lease.slot for lease in named}) < len(named):
        return "it names a slot twice"
    if min([table.epoch, table.dealt, *(n for lease in named for n in (lease.epoch, lease.at))]) < 0:
        return "it counts below zero"
    return f"it dealt {table.dealt} of {count} slots" if table.dealt > count else ""


def broken(table: SlotTable, reads: Mapping[str, Reads]) -> dict[str, str]:
    """Of those who read what they do not hold, or not from where it stands: why their work cannot count."""
    found = {}
    for peer, each in reads.items():
        held = {lease.slot: lease for lease in table.held(peer)}
        for read in each:
            lease = held.get(read.slot)
            if lease is None:
                found[peer] = f"it read data slot {read.slot}, which is not leased to it any more"
            elif (lease.epoch, lease.at) != read.start or read.end < read.start:
                where = f"epoch {read.start[0]} token {read.start[1]}"
                stands = f"epoch {lease.epoch} token {lease.at}"
                found[peer] = f"it read data slot {read.slot} from {where}, which stands at {stands}"
    return found


# ---- changes within a round ----------------------------------------------------------------------------------------


def top_up(table: SlotTable, wishes: Mapping[str, int]) -> SlotTable:
    """Lease free slots to these peers in turns, until each holds as many as it wishes or none is free."""
    work = _Work(table)
    work.deal(wishes)
    return work.table()


def reclaim(table: SlotTable, peer: str, leases: Iterable[Lease]) -> SlotTable:
    """Lease to `peer` again what it held and went on reading, as far as nobody else has touched it since."""
    work = _Work(table)
    for lease in leases:
        if work.is_free(lease):
            work.take(peer, lease)
    return work.table()


def give_back(table: SlotTable, peers: Collection[str]) -> SlotTable:
    """These peers hold nothing any more."""
    work = _Work(table)
    for peer in peers:
        work.give_back(peer)
    return work.table()


# ---- at a verdict --------------------------------------------------------------------------------------------------


def settle(table: SlotTable, reads: Mapping[str, Reads], wishes: Mapping[str, int]) -> SlotTable:
    """A round is committed. `reads` is what each peer that obeys the verdict has read, whether it counts or is dropped;
    `wishes` are those of them that live. All that these hold is shared out anew, in fair parts: it is known where every
    slot of theirs stands. Who reads in the middle of a slot keeps it, within its part."""
    work = _Work(table)
    for peer, each in reads.items():
        work.move(peer, each)
    held_by_others = sum(len(held) for peer, held in work.leases.items() if peer not in reads)
    parts = _parts(wishes, table.count - held_by_others)
    for peer in reads:
        begun = [lease for lease in work.give_back(peer) if lease.at > 0]
        for lease in begun[: parts.get(peer, 0)]:
            work.take(peer, lease)
    work.deal(parts)
    return work.table()


def drop(table: SlotTable, reads: Mapping[str, Reads], wishes: Mapping[str, int]) -> SlotTable:
    """A round is skipped. The work of those in `reads` is dropped, that of all others goes on in what they hold; nobody
    loses a lease, and slots that were read to their end are made up for."""
    work = _Work(table)
    for peer, each in reads.items():
        work.move(peer, each)
        for lease in work.give_back(peer):
            if lease.at > 0:
                work.take(peer, lease)
    work.deal(wishes)
    return work.table()


def finished(reads: Reads) -> int:
    """How many slots were read to their end."""
    return sum(read.end[1] == 0 for read in reads)


def _parts(wishes: Mapping[str, int], available: int) -> dict[str, int]:
    """To each what it wishes; if that is more than there is, equal parts to those who wish for more than that."""
    parts: dict[str, int] = {}
    for index, peer in enumerate(sorted(wishes, key=lambda peer: (wishes[peer], peer))):
        parts[peer] = min(wishes[peer], -(-available // (len(wishes) - index)))
        available -= parts[peer]
    return parts


# ---- details -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def order(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    """All slots, in the order in which `epoch` leases them."""
    return tuple(shuffled(count, seed, _EPOCHS, epoch).tolist())


@lru_cache(maxsize=8)
def _places(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Where each slot stands in the epoch's order."""
    places = [0] * count
    for place, slot in enumerate(order(count, seed, epoch)):
        places[slot] = place
    return tuple(places)


def _unnamed(table: SlotTable, slot: int) -> Position:
    passed = _places(table.count, table.seed, table.epoch)[slot] < table.dealt
    return table.epoch + passed, 0


class _Work:
    """A table that is being changed."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._pool = {lease.slot: lease for lease in table.pool}
        self.leases = {peer: list(held) for peer, held in table.leases.items()}
        self._held = {lease.slot for held in table.leases.values() for lease in held}

    def table(self) -> SlotTable:
        pool = tuple(self._pool[slot] for slot in sorted(self._pool))
        leases = {peer: tuple(self.leases[peer]) for peer in sorted(self.leases) if self.leases[peer]}
        return replace(self._table, pool=pool, leases=leases)

    def is_free(self, lease: Lease) -> bool:
        """Whether this slot is nobody's, and stands where this lease says."""
        if not 0 <= lease.slot < self._table.count or lease.slot in self._held:
            return False
        pooled = self._pool.get(lease.slot)
        stands = (pooled.epoch, pooled.at) if pooled else _unnamed(self._table, lease.slot)
        return stands == (lease.epoch, lease.at)

    def take(self, peer: str, lease: Lease) -> None:
        self._pool.pop(lease.slot, None)
        self._held.add(lease.slot)
        self.leases.setdefault(peer, []).append(lease)

    def give_back(self, peer: str) -> list[Lease]:
        """Take all from this peer; returns what it held."""
        given = self.leases.pop(peer, [])
        for lease in given:
            self._held.discard(lease.slot)
            if lease.at or lease.epoch != _unnamed(self._table, lease.slot)[0]:
                self._pool[lease.slot] = lease
        return given

    def move(self, peer: str, reads: Reads) -> None:
        ends = {read.slot: read.end for read in reads}
        self.leases[peer] = [
            Lease(lease.slot, *ends.get(lease.slot, (lease.epoch, lease.at)))
            for lease in self.leases.get(peer, ())
        ]

    def deal(self, wishes: Mapping[str, int]) -> None:
        """One slot to each in turn, whoever holds less than it wishes; until none is free."""
        came_back = self._queue()
        hungry = sorted(peer for peer, wish in wishes.items() if self._holds(peer) < wish)
        while hungry:
            for peer in hungry:
                lease = self._next(came_back)
                if lease is None:
                    return
                self.take(peer, lease)
            hungry = [peer for peer in hungry if self._holds(peer) < wishes[peer]]

    def _holds(self, peer: str) -> int:
        return len(self.leases.get(peer, ()))

    def _queue(self) -> list[Lease]:
        """What came back: the last one is to be leased first."""
        count, seed = self._table.count, self._table.seed

        def urgency(lease: Lease) -> tuple[int, bool, int]:
            return lease.epoch, lease.at == 0, _places(count, seed, lease.epoch)[lease.slot]

        return sorted(self._pool.values(), key=urgency, reverse=True)

    def _next(self, came_back: list[Lease]) -> Lease | None:
        while True:
            table = self._table
            if came_back and came_back[-1].epoch <= table.epoch:
                return came_back.pop()
            whole = order(table.count, table.seed, table.epoch)
            for place in range(table.dealt, table.count):
                if whole[place] not in self._held and whole[place] not in self._pool:
                    self._table = replace(table, dealt=place + 1)
                    return Lease(whole[place], table.epoch)
            if not came_back and len(self._held) >= table.count:
                return None
            self._table = replace(table, epoch=table.epoch + 1, dealt=0)
