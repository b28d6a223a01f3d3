"""One source as the fetch thread sees it: a watcher asks what it holds, workers take pieces from the board.

A piece is kept only once it was checked, in memory of the worker's own, so a slow or lying source cannot spoil what
another one gave. A source that fails rests for a while, longer each time; one that lied is not asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from atoll.recovery.board import Take
from atoll.recovery.held import Held, Stock
from atoll.recovery.ledger import Ledger
from atoll.recovery.source_link import SourceFailedError, SourceLacksError, SourceLiedError, SourceLink
from atoll.recovery.targets import Source
from atoll.recovery.update import PIECE_BYTES
from atoll.recovery.wanted import DisagreesError, Wanted

_REST_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
_LOOK_S: Final = 1.0
_LOOK_SOON_S: Final = 0.1
_IDLE_S: Final = 0.1

Piece = Take[Source, Wanted]


@dataclass(slots=True)
class Common:
    """What all taps share: how to ask, and what to ask for."""

    ledger: Ledger
    open_link: Callable[[Source], SourceLink]
    lied: Callable[[Source, str], None]
    after: int = 0
    soon: bool = True
    look: asyncio.Event = field(default_factory=asyncio.Event)
    work: asyncio.Event = field(default_factory=asyncio.Event)
    fetches: dict[Piece, asyncio.Task[None]] = field(default_factory=dict)

    def look_now(self) -> None:
        """Every watcher asks at once."""
        self.look.set()
        self.look = asyncio.Event()

    def there_is_work(self) -> None:
        self.work.set()
        self.work = asyncio.Event()

    def call_off(self, takes: list[Piece]) -> None:
        for take in takes:
            if take in self.fetches:
                self.fetches[take].cancel()


class Tap:
    """The tasks of one source."""

    def __init__(self, source: Source, common: Common) -> None:
        self._source, self._common, self._ledger = source, common, common.ledger
        self._introducing = asyncio.Lock()
        self._failures = 0
        self._rests_until_s = 0.0

    async def watch(self) -> None:
        """Ask what it holds, again and again."""
        link = self._common.open_link(self._source)
        try:
            while True:
                await asyncio.sleep(max(0.0, self._rests_until_s - time.monotonic()))
                look = self._common.look
                try:
                    told = await link.get_small(f"held/{self._common.after}")
                    self._ledger.tell_stock(self._source, Stock(msgspec.json.decode(told, type=Held)))
                    self._common.there_is_work()
                except (SourceFailedError, SourceLacksError, msgspec.MsgspecError) as error:
                    self._fail(str(error) or "it tells nothing")
                    continue
                await _first(look, _LOOK_SOON_S if self._common.soon else _LOOK_S)
        finally:
            await link.close()

    async def work(self) -> None:
        """Take pieces and fetch them, one after the other."""
        link, memory = self._common.open_link(self._source), np.empty(PIECE_BYTES, dtype=np.uint8)
        try:
            while True:
                work = self._common.work
                rests = time.monotonic() < self._rests_until_s
                take = None if rests else self._ledger.take(self._source)
                if take is None:
                    await _first(work, _IDLE_S)
                    continue
                fetch = asyncio.create_task(self._fetch(link, take, memory))
                self._common.fetches[take] = fetch
                try:
                    await asyncio.wait([fetch])
                except asyncio.CancelledError:
                    fetch.cancel()
                    self._ledger.give_up(take)
                    raise
                finally:
                    del self._common.fetches[take]
                if fetch.cancelled():
                    self._ledger.give_up(take)
                elif (error := fetch.exception()) is not None:
                    self._judge(take, error)
        finally:
            await link.close()

    async def _fetch(self, link: SourceLink, take: Piece, memory: np.ndarray) -> None:
        item, number = take.item, take.number
        async with self._introducing:
            head = self._ledger.head_at(self._source, item)
            if head is None:
                raise SourceLacksError
            if not item.is_introduced(self._source, head):
                told = await link.get_small(head)
                try:
                    item.introduce(self._source, head, told)
                except ValueError as error:
                    raise SourceLiedError(f"{item.name}: {error}") from None
        if item.has_already(number):
            self._finish(take, None)
            return
        data, got = memory[: take.size_bytes], 0

        def put(part: bytes) -> None:
            nonlocal got
            data[got : got + len(part)] = np.frombuffer(part, dtype=np.uint8)
            got += len(part)
            self._ledger.got(take, len(part))

        for span in item.spans(self._source, number):
            await link.get_span(span, put)
        if not item.fits(number, data):
            raise SourceLiedError(f"{item.name}: piece {number} does not have the digest it should have")
        self._finish(take, data)

    def _finish(self, take: Piece, data: np.ndarray | None) -> None:
        self._failures = 0
        self._common.call_off(self._ledger.finish(take, data))

    def _judge(self, take: Piece, error: BaseException) -> None:
        """What a fetch that went wrong means for its piece and its source."""
        lacks_it = isinstance(error, (SourceLacksError, DisagreesError))
        self._ledger.give_up(take, lacks_it)
        self._common.there_is_work()
        if lacks_it:
            self._common.look_now()
        elif isinstance(error, SourceLiedError):
            self._common.lied(self._source, str(error))
        elif isinstance(error, SourceFailedError):
            self._fail(str(error))
        else:
            raise error

    def _fail(self, why: str) -> None:
        rest_s = _REST_S[min(self._failures, len(_REST_S) - 1)]
        if not self._failures:
            self._ledger.note(f"{self._source}: {why}; others are asked for now")
        self._failures += 1
        self._rests_until_s = time.monotonic() + rest_s
        self._ledger.tell_stock(self._source, None)


async def _first(event: asyncio.Event, timeout_s: float) -> None:
    """Until the event, for at most `timeout_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
