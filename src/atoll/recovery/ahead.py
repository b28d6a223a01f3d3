"""The next updates that a catch-up will want: fetched while a snapshot's last pieces come, or one is replayed."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

from atoll.recovery.fetching import Fetcher
from atoll.recovery.targets import Target
from atoll.recovery.wanted import WantedUpdate, most_update_bytes

WINDOW_BYTES: Final = 256 << 20
WINDOW_UPDATES: Final = 64
"""So many are wanted ahead; but two, whatever their size."""


class Ahead:
    """Updates in order, each from the version of the one before. For the training thread."""

    def __init__(self, fetcher: Fetcher, numel: int) -> None:
        self._fetcher, self._numel = fetcher, numel
        self._wanted: deque[WantedUpdate] = deque()

    @property
    def first(self) -> WantedUpdate | None:
        return self._wanted[0] if self._wanted else None

    def extend(self, version: int, target: Target) -> None:
        """Want the next updates from `version` on that are held, as many as may be in memory at once."""
        if self._wanted and self._wanted[0].version != version + 1:
            self.drop()
        version = self._wanted[-1].version if self._wanted else version
        stocks = self._fetcher.ledger.offers().values()
        waiting_bytes = sum(item.size_bytes for item in self._wanted)
        while version < target.version and len(self._wanted) < WINDOW_UPDATES:
            version += 1
            sizes = Counter(stock.updates[version].size_bytes for stock in stocks if version in stock.updates)
            size_bytes, _ = sizes.most_common(1)[0] if sizes else (0, 0)
            if not 0 < size_bytes <= most_update_bytes(self._numel):
                return
            waiting_bytes += size_bytes
            if waiting_bytes > WINDOW_BYTES and len(self._wanted) >= 2:
                return
            item = WantedUpdate(version, size_bytes, self._numel)
            self._wanted.append(item)
            self._fetcher.want(item)

    def pop(self) -> None:
        """The first one is there, or is not wanted any more."""
        self._fetcher.forget(self._wanted.popleft())

    def drop(self) -> None:
        """None of them is wanted any more."""
        while self._wanted:
            self.pop()
