"""One catch-up, on the training thread: look what there is, choose, replay or load, until the newest version is held.

Whatever takes longer than a moment calls `_pulse`, which looks up (`recovery.lookout`).
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from atoll import kernels
from atoll.kernels import Floats
from atoll.recovery.ahead import Ahead
from atoll.recovery.choosing import Choice, Offer, choose
from atoll.recovery.fetching import Fetcher
from atoll.recovery.held import Stock
from atoll.recovery.inner import WantedInner, most_inner_bytes
from atoll.recovery.lookout import SLICE_S, Callers, Lookout
from atoll.recovery.targets import InnerTaken, Source, Target
from atoll.recovery.update import replay
from atoll.recovery.wanted import Wanted, WantedSnapshot, WantedUpdate
from atoll.state import manifest as manifests
from atoll.state.manifest import VALUE_BYTES, VECTORS, Vector
from atoll.state.snapshot import SharedState

UNUSABLE: Final = -1
"""`state.version` while a snapshot is there in part only."""

PATIENCE_S: Final = 2.0
"""How long an update that nobody holds yet is believed to be still to come."""
ASK_AGAIN_S: Final = 30.0

_TELL_S: Final = 5.0
_SLICE_ELEMENTS: Final = 32 * kernels.PIECE


class Pursuit:
    """The state's way to the target, and what has to be remembered on it."""

    def __init__(
        self,
        state: SharedState,
        fetcher: Fetcher,
        callers: Callers,
        *,
        run: str,
        peer: str,
        deadline_s: float,
        with_inner: bool = False,
    ) -> None:
        self._state, self._fetcher, self._callers, self._run = state, fetcher, callers, run
        self._lookout = Lookout(fetcher, callers, peer=peer, deadline_s=deadline_s)
        self._usable = True  # what the state holds can be built on
        self._loaded = False
        self._proven = False  # the state had the run's digest
        self._suspects: set[Source] = set()  # who gave the updates that were taken since
        self._ahead = Ahead(fetcher, state.anchor.size)
        self._mean: Floats | None = None
        self._asked_s: float | None = None
        self._stuck: tuple[int, float] = (UNUSABLE, 0.0)
        self._told_s = time.monotonic()
        self.snapshot_version: int | None = None
        self.num_updates = 0
        self._with_inner = with_inner
        self.inner = InnerTaken()

    def go(self, target: Target) -> None:
        """Returns when the state is at the target's version."""
        self._usable = target.trusted and self._state.version >= 0 and not self._with_inner
        if self._usable and self._state.version in target.digests:
            self._compare(target)
        try:
            self._go(target)
        finally:
            self._ahead.drop()

    def _go(self, target: Target) -> None:
        while not self._is_there(target):
            choice = self._choose(target)
            match choice.kind:
                case "replay":
                    self._callers.note(choice.reason)
                    target = self._replay(target)
                case "snapshot":
                    self._callers.note(choice.reason)
                    target = self._load(choice.version, target)
                    if self._with_inner and self._state.version == choice.version:
                        target = self._take_inner(choice.version, target)
                case "ask":
                    self._ask(choice)
                    target = self._pulse()
                case "wait":
                    target = self._pulse()

    def _is_there(self, target: Target) -> bool:
        if not self._usable or self._state.version != target.version:
            return False
        if self._suspects and target.version in target.digests:
            self._compare(target)
        return self._usable

    def _choose(self, target: Target) -> Choice:
        now_s = time.monotonic()
        if self._stuck[0] != self._state.version:
            self._stuck = (self._state.version, now_s)
        return choose(
            version=self._state.version if self._usable else None,
            target=target.version,
            known=target.digests.keys(),
            offers=[
                Offer(
                    frozenset(stock.snapshots),
                    {version: each.size_bytes for version, each in stock.updates.items()},
                )
                for stock in self._fetcher.ledger.offers().values()
            ],
            snapshot_bytes=len(VECTORS) * self._state.anchor.size * VALUE_BYTES,
            patient=now_s - self._stuck[1] < PATIENCE_S,
            asked_in_vain=self._asked_s is not None and now_s - self._asked_s > ASK_AGAIN_S / 2,
        )

    def _ask(self, choice: Choice) -> None:
        now_s = time.monotonic()
        if self._asked_s is None or now_s - self._asked_s > ASK_AGAIN_S:
            self._callers.note(choice.reason)
            self._callers.want_snapshot()
            self._asked_s = now_s

    def _pulse(self, timeout_s: float = SLICE_S) -> Target:
        """Wait for news, a moment at most, and look up. Raises whatever ends this catch-up."""
        after = self._state.version if self._usable else UNUSABLE
        target = self._lookout.pulse(self._state.version, after, timeout_s)
        if not target.trusted and not self._loaded:
            self._usable = False
        return target

    # ---- updates -------------------------------------------------------------------------------------------------

    def _replay(self, target: Target) -> Target:
        """Take updates as long as there are any, fetching the next ones meanwhile."""
        while self._usable:
            self._ahead.extend(self._state.version, target)
            first = self._ahead.first
            if first is None:
                break
            if self._fetcher.ledger.has(first):
                self._ahead.pop()
                if not self._take(first, target):
                    break
                target = self._pulse(0.0)
            elif self._is_lost(first):
                break
            else:
                target = self._pulse()
        self._ahead.drop()
        return target

    def _take(self, item: WantedUpdate, target: Target) -> bool:
        """Replay one. False if it or the state is wrong, and something else is to be chosen."""
        if self._mean is None:
            self._mean = np.empty(self._state.anchor.size, dtype=np.float32)
        try:
            replay(self._state, item.update, item.data, self._mean)
        except ValueError as error:
            self._fetcher.ban(item.givers, str(error))
            return False
        self.num_updates += 1
        self._asked_s = None
        self._lookout.race.replayed_one()
        self._suspects |= item.givers
        if self._state.version in target.digests:
            self._compare(target)
        if self._usable:
            self._callers.replayed(item.update, item.data)
        return self._usable

    # ---- a snapshot ----------------------------------------------------------------------------------------------

    def _load(self, version: int, target: Target) -> Target:
        """Read a snapshot over the state, and after its last pieces the updates that follow it. If it goes before it is
        there, something else is to be chosen."""
        self._ahead.drop()
        state, before = self._state, self._state.version
        item = WantedSnapshot(version, target.digests[version], self._run, state, self._own_rows())
        state.version = UNUSABLE
        self._fetcher.want(item)
        try:
            while not self._fetcher.ledger.has(item):
                if self._is_lost(item):
                    return target
                self._ahead.extend(version, target)
                target = self._pulse()
                self._tell_progress(item)
        finally:
            self._fetcher.forget(item)
            if not item.touched:
                state.version = before
            elif state.version == UNUSABLE:
                self._usable = False
        state.version, (state.round, state.step) = version, item.round_and_step
        self.snapshot_version = version
        self._usable = self._loaded = self._proven = True
        self._suspects.clear()
        self._asked_s = None
        self._lookout.race.restart()
        return target

    def _take_inner(self, version: int, target: Target) -> Target:
        """The inner state of the first donor that gives all of it; before any updates, while it is still staged. Those
        that do not answer yet, because their sidecars begin just now, get `PATIENCE_S`."""
        tried: set[Source] = set()
        until_s = time.monotonic() + PATIENCE_S
        while True:
            offers = self._fetcher.ledger.offers()
            sizes = {
                each: self._inner_bytes(stock, version) for each, stock in offers.items() if each not in tried
            }
            source = next((each for each, size_bytes in sizes.items() if size_bytes), None)
            if source is None:
                if len(offers) >= len(target.sources) or time.monotonic() > until_s:
                    return target
                target = self._pulse()
                continue
            tried.add(source)
            item = WantedInner(version, source, sizes[source])
            self._fetcher.want(item)
            try:
                while not self._fetcher.ledger.has(item) and self._gives(source, item):
                    target = self._pulse()
                if self._fetcher.ledger.has(item):
                    self.inner = InnerTaken(item.data.tobytes(), source.peer, version, "")
                    return target
            finally:
                self._fetcher.forget(item)
            self._callers.note(f"{item.name} is not to be had any more")

    def _inner_bytes(self, stock: Stock, version: int) -> int:
        """What it says it has; 0 for nothing, or more than there can be."""
        found = stock.snapshots.get(version)
        size_bytes = found.inner_bytes if found else 0
        return size_bytes if 0 < size_bytes <= most_inner_bytes(self._state.anchor.size) else 0

    def _gives(self, source: Source, item: WantedInner) -> bool:
        stock = self._fetcher.ledger.offers().get(source)
        return stock is not None and item.head_at(source, stock) is not None

    def _own_rows(self) -> dict[Vector, list[str]]:
        """The state's digest tables."""
        rows: dict[Vector, list[str]] = {}
        for vector, values in zip(VECTORS, (self._state.anchor, self._state.velocity), strict=True):
            rows[vector] = []
            for start in range(0, values.size, _SLICE_ELEMENTS):
                self._callers.check()
                rows[vector] += manifests.rows_of(values[start : start + _SLICE_ELEMENTS], start)
        return rows

    def _tell_progress(self, item: WantedSnapshot) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= _TELL_S:
            self._told_s = now_s
            left = self._fetcher.ledger.num_left(item)
            bytes_per_s, _ = self._fetcher.ledger.speed()
            self._callers.note(
                f"{item.name}: {left} of {len(item.pieces())} pieces to come, at {bytes_per_s / 1e6:.3g} MB/s"
            )

    # ---- both ----------------------------------------------------------------------------------------------------

    def _is_lost(self, item: Wanted) -> bool:
        """Whether sources answer, and none of them has it any more."""
        offers = self._fetcher.ledger.offers()
        return bool(offers) and all(item.head_at(source, stock) is None for source, stock in offers.items())

    def _compare(self, target: Target) -> None:
        """Compare the state with the run's digest of its version. If it differs it is no use, and who gave the updates
        since it had the right one is not asked again."""
        rows = self._own_rows()
        if (
            manifests.digest_of(tuple(rows["anchor"]), tuple(rows["velocity"]))
            == target.digests[self._state.version]
        ):
            self._proven = True
        else:
            self._callers.note(f"version {self._state.version} has another digest here than in the run")
            self._usable = False
            if self._proven:
                self._fetcher.ban(self._suspects, f"updates to version {self._state.version}")
            self._proven = False
        self._suspects.clear()
