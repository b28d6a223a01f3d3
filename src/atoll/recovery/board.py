"""Who fetches which piece: a queue of pieces that several sources work on. Pure; times are handed in.

A source takes the first piece that nobody has and that it can give; once it has given its part, that is as much as
each would, others go first as long as they fill the line (`recovery.sharing`). Once there is none, the last pieces are
still on their way, some perhaps from slow sources: then a fast one takes a piece a second time, if the first had as
long as it would need itself, and will still need well longer. At most `MAX_SECOND_TAKES` for one item; whoever comes
first wins, the other is called off.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

from atoll.recovery.sharing import Sharing

MAX_SECOND_TAKES: Final = 4
_WELL_BEFORE: Final = 2.0
_WELL_BEFORE_S: Final = 1.0
_UNKNOWN_S: Final = 1.0
"""What a piece is thought to take from a source that has not given one yet."""


class Item(Protocol):
    """Something to fetch, in numbered pieces."""

    def pieces(self) -> tuple[int, ...]:
        """The numbers of the pieces that are wanted."""
        ...

    def piece_bytes(self, number: int) -> int: ...


S = TypeVar("S", bound=Hashable)
ItemT = TypeVar("ItemT", bound=Item)


@dataclass(eq=False, slots=True)
class Take(Generic[S, ItemT]):
    """One source's work on one piece."""

    item: ItemT
    number: int
    source: S
    size_bytes: int
    since_s: float
    got_bytes: int = 0
    heard_s: float = 0.0

    def got(self, num_bytes: int, now_s: float) -> None:
        self.got_bytes += num_bytes
        self.heard_s = now_s

    def remaining_s(self, now_s: float) -> float:
        """What is left at the speed so far; a silence is expected to last as long again."""
        silent_s = now_s - max(self.heard_s, self.since_s)
        if not self.got_bytes:
            return silent_s
        speed = self.got_bytes / max(now_s - self.since_s, 1e-6)
        return max(silent_s, (self.size_bytes - self.got_bytes) / speed)


@dataclass(eq=False, slots=True)
class _Job(Generic[S, ItemT]):
    """An item that is being fetched."""

    item: ItemT
    waiting: deque[int]
    left: set[int]
    takes: list[Take[S, ItemT]] = field(default_factory=list)
    lacking: set[S] = field(default_factory=set)
    second_takes: int = 0


class Board(Generic[S, ItemT]):
    """Items in the order in which they are wanted, and who is at work on them."""

    def __init__(self) -> None:
        self._jobs: list[_Job[S, ItemT]] = []
        self._piece_s: dict[S, tuple[int, float]] = {}
        self._sharing: Sharing[S] = Sharing()
        self._wanted_bytes = 0
        self._given_bytes: Counter[S] = Counter()

    def add(self, item: ItemT) -> None:
        numbers = item.pieces()
        self._jobs.append(_Job(item, deque(numbers), set(numbers)))
        self._wanted_bytes += sum(item.piece_bytes(number) for number in numbers)

    def drop(self, item: ItemT) -> list[Take[S, ItemT]]:
        """Nobody wants it any more. Returns the takes to call off."""
        job = self._find(item)
        if job is None:
            return []
        self._jobs.remove(job)
        self._wanted_bytes -= sum(item.piece_bytes(number) for number in job.left)
        return list(job.takes)

    def is_busy(self) -> bool:
        return any(job.takes for job in self._jobs)

    def num_left(self, item: ItemT) -> int:
        """Pieces that are not there yet; 0 for an item that is not on the board."""
        job = self._find(item)
        return len(job.left) if job else 0

    def take(
        self,
        source: S,
        gives: Callable[[ItemT], bool],
        now_s: float,
        others: Callable[[ItemT], Collection[S]] = lambda item: (),
    ) -> Take[S, ItemT] | None:
        """The next piece for a source; `gives` says whether it gives an item, `others` which other sources do."""
        for job in self._jobs:
            if job.waiting and source not in job.lacking and gives(job.item):
                if self._lets_others(job, source, others(job.item), now_s):
                    return None
                return self._take(job, job.waiting.popleft(), source, now_s)
        for job in self._jobs:
            if source not in job.lacking and gives(job.item) and job.second_takes < MAX_SECOND_TAKES:
                slow = self._slow_take(job, source, now_s)
                if slow is not None:
                    job.second_takes += 1
                    return self._take(job, slow.number, source, now_s)
        return None

    def got(self, take: Take[S, ItemT], num_bytes: int, now_s: float) -> None:
        """Part of a piece came."""
        take.got(num_bytes, now_s)
        self._sharing.got(num_bytes, now_s)

    def finish(self, take: Take[S, ItemT], now_s: float) -> list[Take[S, ItemT]] | None:
        """A piece is there. Returns the other takes of it, to call off; None if it was there already."""
        if take.got_bytes:
            self._piece_s[take.source] = (take.got_bytes, now_s - take.since_s)
            self._given_bytes[take.source] += take.got_bytes
        job = self._find(take.item)
        if job is None or take not in job.takes or take.number not in job.left:
            return None
        job.left.remove(take.number)
        job.takes.remove(take)
        return [each for each in job.takes if each.number == take.number]

    def give_up(self, take: Take[S, ItemT], lacks_it: bool = False) -> None:
        """The source failed, was called off, or lacks the item now: its piece is for another."""
        job = self._find(take.item)
        if job is None:
            return
        if lacks_it:
            job.lacking.add(take.source)
        if take in job.takes:
            job.takes.remove(take)
            if take.number in job.left and not any(each.number == take.number for each in job.takes):
                job.waiting.appendleft(take.number)

    def offers_again(self, source: S) -> None:
        """The source said anew what it holds: what it lacked it may have by now."""
        for job in self._jobs:
            job.lacking.discard(source)

    def _find(self, item: ItemT) -> _Job[S, ItemT] | None:
        return next((job for job in self._jobs if job.item is item), None)

    def _take(self, job: _Job[S, ItemT], number: int, source: S, now_s: float) -> Take[S, ItemT]:
        take = Take(job.item, number, source, job.item.piece_bytes(number), now_s)
        job.takes.append(take)
        return take

    def _lets_others(self, job: _Job[S, ItemT], source: S, others: Collection[S], now_s: float) -> bool:
        """Whether this source has its part, one of the others does not, and it waits for that one."""
        others = [each for each in others if each not in job.lacking]
        part_bytes = self._wanted_bytes / (1 + len(others))
        half_bytes = job.item.piece_bytes(job.waiting[0]) / 2  # parts are rounded to whole pieces

        def has_its_part(each: S) -> bool:
            return self._given_bytes[each] + self._coming_bytes(each) + half_bytes > part_bytes

        if not has_its_part(source) or all(has_its_part(each) for each in others):
            self._sharing.keeps_its_part(source)
            return False
        return self._sharing.waits(source, now_s)

    def _coming_bytes(self, source: S) -> int:
        return sum(take.size_bytes for job in self._jobs for take in job.takes if take.source == source)

    def _slow_take(self, job: _Job[S, ItemT], source: S, now_s: float) -> Take[S, ItemT] | None:
        """The slowest piece that this source should have well before the one who has it. A source whose own work
        takes well longer than it used to is no help: a round holds them all up alike."""
        worst, worst_s = None, 0.0
        own = [take for each in self._jobs for take in each.takes if take.source == source]
        if any(self._is_late(take, now_s) for take in own):
            return None
        for take in job.takes:
            others = [each for each in job.takes if each.number == take.number]
            if len(others) > 1 or take.source == source:
                continue
            remaining_s, own_s = take.remaining_s(now_s), self._expected_s(source, take.size_bytes)
            if now_s - take.since_s < own_s:
                continue
            if remaining_s > max(_WELL_BEFORE * own_s, own_s + _WELL_BEFORE_S, worst_s):
                worst, worst_s = take, remaining_s
        return worst

    def _is_late(self, take: Take[S, ItemT], now_s: float) -> bool:
        expected_s = self._expected_s(take.source, take.size_bytes)
        needs_s = now_s - take.since_s + take.remaining_s(now_s)
        return needs_s > max(_WELL_BEFORE * expected_s, expected_s + _WELL_BEFORE_S)

    def _expected_s(self, source: S, size_bytes: int) -> float:
        if source not in self._piece_s:
            return _UNKNOWN_S
        piece_bytes, piece_s = self._piece_s[source]
        return piece_s * size_bytes / max(piece_bytes, 1)
