"""Whether a source that has given its part lets others give theirs. Pure; times are handed in.

Sources share the fetcher's own line. The one that began first, or gets through best, would give nearly all. So a source
with its part done waits, while others fill the line as well as all of them did before. If they do not, it goes on, each
time for twice as many pieces as the last: waiting in vain soon takes next to no time, and a round, which slows all
alike, moves one piece only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

_LOOK_S: Final = 0.5
"""What the line carries is what came in so many seconds."""
_FULL: Final = 0.7
"""The line is full while it carries this share of what it did."""
_MOST_PIECES: Final = 1024

S = TypeVar("S", bound=Hashable)


@dataclass(slots=True)
class _Turn:
    """How a source waits, or goes on though it is ahead."""

    since_s: float
    bytes_per_s: float
    free_pieces: int = 0
    next_pieces: int = 1


class Sharing(Generic[S]):
    """What came lately, and who waits because of it."""

    def __init__(self) -> None:
        self._came: deque[tuple[float, int]] = deque()
        self._turns: dict[S, _Turn] = {}

    def got(self, num_bytes: int, now_s: float) -> None:
        """Bytes came, from whichever source."""
        self._came.append((now_s, num_bytes))
        self._forget(now_s)

    def keeps_its_part(self, source: S) -> None:
        """It has not more than its part, or nobody has less."""
        self._turns.pop(source, None)

    def waits(self, source: S, now_s: float) -> bool:
        """Whether a source that is ahead of others waits for them. If not, it takes a piece now."""
        turn = self._turns.get(source)
        if turn is None:
            self._turns[source] = _Turn(now_s, self._bytes_per_s(now_s))
            return True
        if not turn.free_pieces:
            looked = now_s - turn.since_s >= _LOOK_S
            if not looked or 0 < self._bytes_per_s(now_s) >= _FULL * turn.bytes_per_s:
                return True
            turn.free_pieces = turn.next_pieces
            turn.next_pieces = min(2 * turn.next_pieces, _MOST_PIECES)
        turn.free_pieces -= 1
        if not turn.free_pieces:
            turn.since_s, turn.bytes_per_s = now_s, max(turn.bytes_per_s, self._bytes_per_s(now_s))
        return False

    def _bytes_per_s(self, now_s: float) -> float:
        self._forget(now_s)
        return sum(num_bytes for _, num_bytes in self._came) / _LOOK_S

    def _forget(self, now_s: float) -> None:
        while self._came and self._came[0][0] < now_s - _LOOK_S:
            self._came.popleft()
