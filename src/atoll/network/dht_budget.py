"""How many calls a node of the DHT listens to: so many from one source, so many in all. Pure but for its clock."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict

from atoll.clock import Clock

SOURCE_PER_S, SOURCE_AT_ONCE = 50.0, 100.0
ALL_PER_S, ALL_AT_ONCE = 500.0, 1000.0
"""A call costs up to 0.2 ms, that of a signature: all of them a tenth of a processor."""
MOST_SOURCES = 1024


class Budget:
    """Token buckets. Of many sources (they can be made up) the ones longest silent are forgotten."""

    def __init__(
        self,
        clock: Clock,
        *,
        source: tuple[float, float] = (SOURCE_PER_S, SOURCE_AT_ONCE),
        all_sources: tuple[float, float] = (ALL_PER_S, ALL_AT_ONCE),
        most_sources: int = MOST_SOURCES,
    ) -> None:
        """Each pair is calls per second, and how many may come at once."""
        self._clock = clock
        self._source, self._most_sources = source, most_sources
        self._all = _Bucket(*all_sources, clock.now_s())
        self._sources: OrderedDict[str, _Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sources)

    def allows(self, host: str) -> bool:
        """Whether a call from there is listened to; it counts if it is."""
        now_s = self._clock.now_s()
        name = _network(host)
        bucket = self._sources.setdefault(name, _Bucket(*self._source, now_s))
        self._sources.move_to_end(name)
        if len(self._sources) > self._most_sources:
            self._sources.popitem(last=False)
        return bucket.take(now_s) and self._all.take(now_s)


class _Bucket:
    def __init__(self, per_s: float, at_once: float, now_s: float) -> None:
        self._per_s, self._at_once = per_s, at_once
        self._left, self._as_of_s = at_once, now_s

    def take(self, now_s: float) -> bool:
        self._left = min(self._at_once, self._left + self._per_s * (now_s - self._as_of_s))
        self._as_of_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


def _network(host: str) -> str:
    """Who counts as one source: an IPv4 address, or an IPv6 network of 64 bits, which is one machine's to use."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return str(address) if address.version == 4 else str(int(address) >> 64)
