"""How fast bytes come while they are waited for: idle time and stalls do not count. Pure; times are handed in."""

from __future__ import annotations

from typing import Final

_STALL_S: Final = 1.0


class Meter:
    """Bytes, and the seconds in which they came."""

    def __init__(self) -> None:
        self.active_s = 0.0
        self._bytes = 0
        self._last_s: float | None = None

    @property
    def bytes_per_s(self) -> float:
        return self._bytes / self.active_s if self.active_s > 0 else 0.0

    def begin(self, now_s: float) -> None:
        """Something is on its way."""
        if self._last_s is None:
            self._last_s = now_s

    def add(self, num_bytes: int, now_s: float) -> None:
        self._bytes += num_bytes
        if self._last_s is not None:
            passed_s = now_s - self._last_s
            self.active_s += passed_s if passed_s < _STALL_S else 0.0
            self._last_s = now_s

    def end(self) -> None:
        """Nothing is on its way any more."""
        self._last_s = None
