"""A crew whose ranks are threads of one process: for what ranks say to each other, without torch and sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from atoll.errors import AtollError
from atoll.mesh.crew import Crew

WAIT_S = 20.0


class ThreadCrew(Crew):
    """One rank of it; made by `together`."""

    def __init__(self, rank: int, num_ranks: int, board: dict[int, Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, num_ranks)
        self._board, self._barrier = board, barrier

    def decide(self, kind: Any, choose: Callable[[], Any], *, within_s: float | None = None) -> Any:
        if self.is_lead:
            try:
                self._board[0] = choose()
            except AtollError as error:
                self._board[0] = error
        self._barrier.wait(WAIT_S)
        found = self._board[0]
        self._barrier.wait(WAIT_S)
        if isinstance(found, AtollError):
            raise found
        return found

    def share(self, kind: Any, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait(WAIT_S)
        found = [self._board[rank] for rank in range(self.num_ranks)]
        self._barrier.wait(WAIT_S)
        return found

    def meet(self) -> None:
        self.share(None, None)


def together(num_ranks: int, work: Callable[[ThreadCrew], Any]) -> list[Any]:
    """What `work` returns or raises on each rank, by rank."""
    board: dict[int, Any] = {}
    barrier = threading.Barrier(num_ranks)

    def one(rank: int) -> Any:
        try:
            return work(ThreadCrew(rank, num_ranks, board, barrier))
        except AtollError as error:
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(one, range(num_ranks)))
