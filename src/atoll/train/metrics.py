"""The speed of training over a window. The time is handed in."""

from __future__ import annotations

from collections import deque


class ThroughputMeter:
    """Tokens per second over the last `window_s` seconds, pauses included."""

    def __init__(self, window_s: float = 30.0) -> None:
        self._window_s = window_s
        self._marks: deque[tuple[float, int]] = deque()  # (when, all tokens until then)
        self._tokens = 0

    def start(self, now_s: float) -> None:
        """Begin to measure at `now_s`, before the first step."""
        self._marks.append((now_s, self._tokens))

    def add(self, tokens: int, now_s: float) -> None:
        """Count `tokens`, done at `now_s`."""
        self._tokens += tokens
        self._marks.append((now_s, self._tokens))
        # The oldest mark stays just outside the window, so that a step longer than that is measured too.
        while len(self._marks) > 2 and self._marks[1][0] <= now_s - self._window_s:
            self._marks.popleft()

    def tokens_per_s(self) -> float:
        """The rate up to the last count; 0 before there is one."""
        if len(self._marks) < 2:
            return 0.0
        (first_s, before), (last_s, after) = self._marks[0], self._marks[-1]
        return (after - before) / (last_s - first_s) if last_s > first_s else 0.0
