"""Batches read before they are asked for, on a thread of their own, so that a slow disk or network stalls no step.

What a batch is made of (`data.reader.Stretches`) is known ahead and costs nothing; only reading it blocks. And it is a
function of the text alone: what was read ahead is right whenever it is asked for, and is dropped where other batches
come next. So this thread knows nothing of positions, leases and rounds, and none of them can be told of its progress.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Final

from atoll.data.reader import Batch, Stretches

_CLOSE_S: Final = 1.0
"""A fetch that is under way may take minutes; nobody waits for it at the end."""


class Prefetcher:
    """Owns the thread `atoll-prefetch`. All methods are for one thread, which takes the batches."""

    def __init__(self, read: Callable[[Stretches], Batch]) -> None:
        """`read` is called on the thread, one call at a time: what it reads need not be safe for several threads."""
        self._read = read
        self._ahead: dict[Stretches, Future[Batch]] = {}
        self._orders: queue.SimpleQueue[tuple[Stretches, Future[Batch]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="atoll-prefetch", daemon=True)
        self._thread.start()

    def expect(self, coming: Iterable[Stretches]) -> None:
        """These batches are asked for next, in this order. Others that were read ahead are dropped."""
        before, self._ahead = self._ahead, {}
        for stretches in coming:
            if stretches not in self._ahead:  # a short text may come round to the same ones
                self._ahead[stretches] = before.pop(stretches, None) or self._order(stretches)
        for dropped in before.values():
            dropped.cancel()

    def take(self, stretches: Stretches) -> Batch:
        """This batch, which need not have been expected. Blocks until it is read, behind what is being read just now;
        raises what reading it raised."""
        return (self._ahead.pop(stretches, None) or self._order(stretches)).result()

    def close(self) -> None:
        """Drop what is not read yet and end the thread. A fetch that does not end soon is left to end with the
        process."""
        self.expect(())
        self._orders.put(None)
        self._thread.join(_CLOSE_S)

    def _order(self, stretches: Stretches) -> Future[Batch]:
        future: Future[Batch] = Future()
        self._orders.put((stretches, future))
        return future

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            stretches, future = order
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._read(stretches))
            except BaseException as error:  # what takes the batch hears it, be it a panic of native code
                future.set_exception(error)
