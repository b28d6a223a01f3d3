"""Time as a value: protocol code is handed `now_s`; whoever must ask for the time asks a `Clock`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock. Clocks of different machines are never compared."""

    def now_s(self) -> float: ...


class MonotonicClock:
    """The machine's own monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


class WakingClock:
    """A monotonic clock that goes on while the machine sleeps, where the system has one (Linux)."""

    def now_s(self) -> float:
        return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class ManualClock:
    """A clock that moves only when told to; for tests and simulations."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds
