"""Measuring links while no round runs, on a thread of its own: neither training nor membership waits for it.

The thread "atoll-probe" begins with the first order. Links are measured one after another, so that each is seen alone;
the engine sends nothing of them while an op runs. Whom this peer can dial is found out for all at once, and first: a
round waits for that, so it is looked for between one measurement and the next.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from atoll.comm.native import NativeCommunicator
from atoll.values import LinkRate, RankInfo

MOST_ORDERS = 64
JOIN_S = 2.0
"""Closing the engine ends what is under way; a thread that does not end by then is a daemon."""


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """Rank 0 of each target; `link_s` bounds each measurement."""

    targets: Mapping[str, RankInfo]
    num_bytes: int
    connections: int
    link_s: float


@dataclass(frozen=True, slots=True)
class ReachOrder:
    """Rank 0 of each target; `trial_s` bounds all trials together."""

    targets: Mapping[str, RankInfo]
    trial_s: float


_Entry = tuple[int, int, ProbeOrder | ReachOrder | None]


class Prober:
    """One peer's prober. `tell(links, failed)` is called on its thread when links were measured: what they carried,
    and, by target, why one was not measured; `tell_reached(where, failed)` likewise when others were dialled: at which
    address each was found, or why not. `begin` is for any one thread, `close` for any."""

    def __init__(
        self,
        peer: str,
        comm: NativeCommunicator,
        tell: Callable[[tuple[LinkRate, ...], dict[str, str]], None],
        tell_reached: Callable[[dict[str, str], dict[str, str]], None] = lambda where, failed: None,
    ) -> None:
        self._peer, self._comm, self._tell, self._tell_reached = peer, comm, tell, tell_reached
        self._orders: queue.PriorityQueue[_Entry] = queue.PriorityQueue()
        self._numbers = itertools.count()  # of orders: those of one kind are taken in turn
        self._thread: threading.Thread | None = None
        self._closed = False

    def begin(self, order: ProbeOrder | ReachOrder) -> None:
        """Does not block."""
        if self._closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="atoll-probe", daemon=True)
            self._thread.start()
        if self._orders.qsize() < MOST_ORDERS:
            self._put(1 if isinstance(order, ProbeOrder) else 0, order)
            return
        failed = dict.fromkeys(order.targets, f"{MOST_ORDERS} orders before it wait")
        if isinstance(order, ProbeOrder):
            self._tell((), failed)
        else:
            self._tell_reached({}, failed)

    def close(self) -> None:
        """After the engine is closed: whatever waits is dropped. Idempotent."""
        self._closed = True
        self._put(-1, None)
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def _put(self, place: int, order: ProbeOrder | ReachOrder | None) -> None:
        self._orders.put((place, next(self._numbers), order))

    def _run(self) -> None:
        while (order := self._orders.get()[2]) is not None and not self._closed:
            if isinstance(order, ReachOrder):
                self._dial(order)
            else:
                self._tell(*self._measure(order))

    def _dial(self, order: ReachOrder) -> None:
        self._tell_reached(*self._comm.reach(order.targets, order.trial_s))

    def _dial_those_that_wait(self) -> None:
        while not self._closed and not self._orders.empty():
            entry = self._orders.get()  # nobody else takes from the queue
            if not isinstance(entry[2], ReachOrder):
                self._orders.put(entry)  # with its number: its turn is the same
                return
            self._dial(entry[2])

    def _measure(self, order: ProbeOrder) -> tuple[tuple[LinkRate, ...], dict[str, str]]:
        links: list[LinkRate] = []
        failed: dict[str, str] = {}
        for target, rank in order.targets.items():
            self._dial_those_that_wait()
            if self._closed:
                break
            rate, rtt_s, why_not = self._comm.probe(
                target, rank, order.num_bytes, order.link_s, order.connections
            )
            if why_not:
                failed[target] = why_not
            else:
                links.append(LinkRate(self._peer, target, rate, rtt_s))
        return tuple(links), failed
