"""Looking up, again and again, while a catch-up goes on: what ended membership, the deadline, the target, the race."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from atoll.errors import DeadlineExceeded, Unreachable
from atoll.kernels import Bytes
from atoll.recovery.fetching import Fetcher
from atoll.recovery.race import Race
from atoll.recovery.targets import Source, Target
from atoll.recovery.update import Update

SLICE_S: Final = 0.1
"""The longest wait between two looks."""


@dataclass(frozen=True, slots=True)
class Callers:
    """What the caller of `catch_up` hands in; all called on its thread."""

    target: Callable[[], Target]
    want_snapshot: Callable[[], None]
    check: Callable[[], None]
    note: Callable[[str], None]
    replayed: Callable[[Update, Bytes], None]


class Lookout:
    """Waits for the fetch thread, and never longer than a moment without a look at everything else."""

    def __init__(self, fetcher: Fetcher, callers: Callers, *, peer: str, deadline_s: float) -> None:
        self._fetcher, self._callers = fetcher, callers
        self._peer, self._deadline_s = peer, deadline_s
        self._started_s = time.monotonic()
        self._sources: tuple[Source, ...] = ()
        self._seen_version = -1
        self.race = Race()

    def pulse(self, version: int, after: int, timeout_s: float = SLICE_S) -> Target:
        """Wait for news, at most `timeout_s`, and look up. Sources tell updates above version `after`; this peer is at
        `version`. Raises whatever ends the catch-up."""
        ledger = self._fetcher.ledger
        ledger.wait(timeout_s)
        self._callers.check()
        target = self._callers.target()
        sources = tuple(each for each in target.sources if each.peer != self._peer)
        if sources != self._sources:
            self._fetcher.set_sources(sources)
            self._sources = sources
        self._fetcher.look(after, soon=not ledger.is_busy())
        if target.version != self._seen_version:
            self._fetcher.look_now()
            self._seen_version = target.version
        for sentence in ledger.notes():
            self._callers.note(sentence)
        now_s = time.monotonic()
        if now_s - self._started_s > self._deadline_s:
            raise DeadlineExceeded(
                f"not at version {target.version} after {self._deadline_s:g} s ({self._progress(version)}); see that "
                "this peer reaches the others' sidecars, or give it more time"
            )
        self._watch_race(target, now_s)
        return target

    def _watch_race(self, target: Target, now_s: float) -> None:
        bytes_per_s, active_s = self._fetcher.ledger.speed()
        needed = self.race.lost(
            version=target.version,
            update_bytes=self._update_bytes(),
            bytes_per_s=bytes_per_s,
            active_s=active_s,
            now_s=now_s,
        )
        if needed is not None:
            raise Unreachable(
                f"the run makes updates of {needed / 1e6:.3g} MB/s and this peer fetches {bytes_per_s / 1e6:.3g} MB/s: "
                "it would never catch up; give it a faster line, or the run longer rounds"
            )

    def _update_bytes(self) -> int:
        """Of the newest update that is held; 0 if there is none."""
        newest = [stock.newest_update for stock in self._fetcher.ledger.offers().values()]
        return max(((each.version, each.size_bytes) for each in newest if each), default=(0, 0))[1]

    def _progress(self, version: int) -> str:
        ledger = self._fetcher.ledger
        return (
            f"version {version}, {sum(ledger.received().values())} bytes fetched, "
            f"{len(ledger.offers())} of {len(self._sources)} sources answer"
        )
