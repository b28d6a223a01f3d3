"""What the training thread and the fetch thread both use, under one lock: the board, the offers, the counts."""

from __future__ import annotations

import threading
import time
from collections import Counter

from atoll.kernels import Bytes
from atoll.recovery.board import Board, Take
from atoll.recovery.held import Stock
from atoll.recovery.meter import Meter
from atoll.recovery.targets import Source
from atoll.recovery.wanted import Wanted


class Ledger:
    """Every method may be called from both threads; only `wait` blocks."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._board: Board[Source, Wanted] = Board()
        self._offers: dict[Source, Stock] = {}
        self._received: Counter[str] = Counter()
        self._meter = Meter()
        self._notes: list[str] = []
        self._changed = False
        self._failure: BaseException | None = None

    # ---- the training thread asks ------------------------------------------------------------------------------

    def want(self, item: Wanted) -> None:
        with self._news:
            self._board.add(item)

    def forget(self, item: Wanted) -> list[Take[Source, Wanted]]:
        """Nothing of it is delivered once this returned. Returns the takes to call off."""
        with self._news:
            off = self._board.drop(item)
            self._measure()
            return off

    def has(self, item: Wanted) -> bool:
        """Whether all pieces of a wanted item are there."""
        with self._news:
            return self._board.num_left(item) == 0

    def num_left(self, item: Wanted) -> int:
        with self._news:
            return self._board.num_left(item)

    def is_busy(self) -> bool:
        """Whether anything is on its way."""
        with self._news:
            return self._board.is_busy()

    def offers(self) -> dict[Source, Stock]:
        """What the sources that answer hold, as they said last."""
        with self._news:
            return dict(self._offers)

    def received(self) -> dict[str, int]:
        """Bytes of pieces so far, by peer."""
        with self._news:
            return dict(self._received)

    def speed(self) -> tuple[float, float]:
        """Bytes per second while something was on its way, and for how many seconds that was."""
        with self._news:
            return self._meter.bytes_per_s, self._meter.active_s

    def notes(self) -> list[str]:
        """What happened since the last call, in sentences."""
        with self._news:
            notes, self._notes = self._notes, []
            return notes

    def wait(self, timeout_s: float) -> None:
        """Until there is news, or `timeout_s`. Raises what ended the fetch thread."""
        with self._news:
            if not self._changed and self._failure is None:
                self._news.wait(timeout_s)
            self._changed = False
            if self._failure is not None:
                raise self._failure

    # ---- the fetch thread tells --------------------------------------------------------------------------------

    def tell_stock(self, source: Source, stock: Stock | None) -> None:
        """None: the source does not answer."""
        with self._news:
            if stock is None:
                self._offers.pop(source, None)
            else:
                self._offers[source] = stock
                self._board.offers_again(source)
            self._notify()

    def head_at(self, source: Source, item: Wanted) -> str | None:
        """Where a source has what introduces it to an item."""
        with self._news:
            stock = self._offers.get(source)
            return item.head_at(source, stock) if stock else None

    def take(self, source: Source) -> Take[Source, Wanted] | None:
        with self._news:
            stock = self._offers.get(source)
            if stock is None:
                return None
            now_s = time.monotonic()

            def others(item: Wanted) -> list[Source]:
                offers = self._offers.items()
                return [
                    each for each, its in offers if each != source and item.head_at(each, its) is not None
                ]

            take = self._board.take(
                source, lambda item: item.head_at(source, stock) is not None, now_s, others
            )
            self._measure()
            return take

    def got(self, take: Take[Source, Wanted], num_bytes: int) -> None:
        """Bytes of a piece came."""
        with self._news:
            now_s = time.monotonic()
            self._board.got(take, num_bytes, now_s)
            self._received[take.source.peer] += num_bytes
            self._meter.add(num_bytes, now_s)

    def finish(self, take: Take[Source, Wanted], data: Bytes | None) -> list[Take[Source, Wanted]]:
        """A checked piece is there (None: it was there before). Returns the takes to call off."""
        with self._news:
            off = self._board.finish(take, time.monotonic())
            if off is not None and data is not None:
                take.item.deliver(take.number, data)
            self._measure()
            self._notify()
            return off or []

    def give_up(self, take: Take[Source, Wanted], lacks_it: bool = False) -> None:
        with self._news:
            self._board.give_up(take, lacks_it)
            self._measure()
            self._notify()

    def note(self, sentence: str) -> None:
        with self._news:
            self._notes.append(sentence)
            self._notify()

    def fail(self, error: BaseException) -> None:
        with self._news:
            self._failure = self._failure or error
            self._notify()

    def _measure(self) -> None:
        if self._board.is_busy():
            self._meter.begin(time.monotonic())
        else:
            self._meter.end()

    def _notify(self) -> None:
        self._changed = True
        self._news.notify_all()
