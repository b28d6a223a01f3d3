"""The records that a node of the DHT holds: valid ones only, the newest of each run, few, small, and for a while.

Pure but for the clock it is given. What strangers send can fill it, and never more than that: a full store takes no
further runs, one source may fill but a part of it, and the run that the node itself belongs to always has its place.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from atoll.clock import Clock
from atoll.network.dht_record import Record, RecordError, read

MOST_RECORDS = 256
MOST_PER_SOURCE = 16
EXPIRY_S = 600.0
"""Records are published again once a minute; those of a run that nobody publishes any more are gone by then."""


@dataclass(slots=True)
class _Held:
    data: bytes
    record: Record
    source: str
    until_s: float


class RecordStore:
    """For one thread. `ignored` counts what was not taken, by reason (a fixed set)."""

    def __init__(
        self,
        clock: Clock,
        *,
        most: int = MOST_RECORDS,
        most_per_source: int = MOST_PER_SOURCE,
        expiry_s: float = EXPIRY_S,
    ) -> None:
        self._clock = clock
        self._most, self._most_per_source, self._expiry_s = most, most_per_source, expiry_s
        self._held: dict[bytes, _Held] = {}
        self._own: bytes | None = None
        self.ignored: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def size_bytes(self) -> int:
        """What all records take, a record being at most `dht_record.MAX_BYTES`."""
        return sum(len(held.data) for held in self._held.values())

    def keep_place_for(self, key: bytes) -> None:
        """This run's record is always taken, however many others there are."""
        self._own = key

    def offer(self, key: bytes, data: bytes, source: str = "") -> bool:
        """Take a record that `source` sent ("": our own). False if it is invalid, older than what is held, or one too
        many. The same one again is held for longer."""
        self._forget_expired()
        held = self._held.get(key)
        if held is None or held.data != data:  # whose signature was checked already
            try:
                record = self._checked(key, data, held, source)
            except RecordError as why:
                self.ignored[str(why)] += 1
                return False
            held = self._held[key] = _Held(data, record, source, 0.0)
        held.until_s = self._clock.now_s() + self._expiry_s
        return True

    def get(self, key: bytes) -> bytes | None:
        held = self._live(key)
        return held.data if held else None

    def newest(self, key: bytes) -> Record | None:
        held = self._live(key)
        return held.record if held else None

    def _checked(self, key: bytes, data: bytes, held: _Held | None, source: str) -> Record:
        """Cheap checks first: a signature costs a hundred times as much."""
        if held is None and key != self._own and source:
            if len(self._held) >= self._most:
                raise RecordError("the store is full")
            if sum(each.source == source for each in self._held.values()) >= self._most_per_source:
                raise RecordError("too many of one source")
        record = read(data)
        if record.key != key:
            raise RecordError("of another run or authority")
        if held is not None and (record.age, data) < (held.record.age, held.data):
            raise RecordError("older than one that is known")
        return record

    def _live(self, key: bytes) -> _Held | None:
        held = self._held.get(key)
        return held if held is not None and self._counts(key, held) else None

    def _counts(self, key: bytes, held: _Held) -> bool:
        """This run's own record does not expire: where no other node offers it again it would be gone for all."""
        return key == self._own or held.until_s > self._clock.now_s()

    def _forget_expired(self) -> None:
        for key in [key for key, held in self._held.items() if not self._counts(key, held)]:
            del self._held[key]
