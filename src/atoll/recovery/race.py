"""Whether a peer can catch up at all: it must fetch updates faster than the run makes them. Pure."""

from __future__ import annotations

from typing import Final

MIN_UPDATES: Final = 3
MIN_ACTIVE_S: Final = 5.0  # a burst of commits, or a source that failed, is no rate yet


class Race:
    """Compares rates since a catch-up, or its second half, began."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._since_s = 0.0
        self._replayed = 0

    def restart(self) -> None:
        """Measure anew: a snapshot is in, from here on updates alone count."""
        self._version, self._replayed = None, 0

    def replayed_one(self) -> None:
        self._replayed += 1

    def lost(
        self, *, version: int, update_bytes: int, bytes_per_s: float, active_s: float, now_s: float
    ) -> float | None:
        """The rate that would be needed, once it is clear that this peer's is less.

        `version` is the run's newest, `update_bytes` what an update has. It is clear when the run got `MIN_UPDATES`
        further ahead, and bytes came too slowly for that whenever any were on their way.
        """
        if self._version is None:
            self._version, self._since_s = version, now_s
        made = version - self._version
        if made - self._replayed < MIN_UPDATES or active_s < MIN_ACTIVE_S or now_s <= self._since_s:
            return None
        needed = made * update_bytes / (now_s - self._since_s)
        return needed if bytes_per_s < needed else None
