"""A limit on bytes per second that many transfers share, first come, first served. For one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

_BURST_S: Final = 0.05
_MOST_AT_ONCE: Final = 256 << 10
_LEAST_AT_ONCE: Final = 8 << 10


class Pace:
    """Whoever moves bytes takes them here first. The rate may change at any time; 0 is no limit."""

    def __init__(self, bytes_per_s: Callable[[], float]) -> None:
        self._bytes_per_s = bytes_per_s
        self._turn = asyncio.Lock()
        self._free_at_s = 0.0

    def at_once(self) -> int:
        """How many bytes are sensibly taken together: few where the rate is low, so that many move evenly."""
        rate = self._bytes_per_s()
        if rate <= 0:
            return _MOST_AT_ONCE
        return max(_LEAST_AT_ONCE, min(_MOST_AT_ONCE, int(rate * _BURST_S)))

    async def take(self, num_bytes: int) -> None:
        """Returns when `num_bytes` may move. Time that nobody used is not saved up, but for a moment."""
        async with self._turn:
            wait_s = self._free_at_s - time.monotonic()
            if wait_s > 0 and self._bytes_per_s() > 0:
                await asyncio.sleep(wait_s)
            rate, now_s = self._bytes_per_s(), time.monotonic()
            if rate > 0:
                self._free_at_s = max(self._free_at_s, now_s - _BURST_S) + num_bytes / rate
            else:
                self._free_at_s = now_s
