"""A joiner in tests: `catch_up` with the callbacks that a session has, and a record of what they were told."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from atoll.recovery.catching_up import CaughtUp, catch_up
from atoll.recovery.donor import Donor
from atoll.recovery.targets import Target
from atoll.state.snapshot import LoadedState
from support.donating import KEY, RUN, target_of
from support.history import History
from support.states import copy_of


@dataclass
class Joiner:
    """Catches up with a history; `during` is called at every check, on the training thread."""

    history: History
    donors: Sequence[Donor]
    state: LoadedState = field(init=False)
    trusted: bool = True
    during: Callable[[], None] = lambda: None
    want: Callable[[], None] = lambda: None
    target: Callable[[], Target] | None = None
    notes: list[str] = field(default_factory=list)
    wanted: int = 0
    replayed: list[int] = field(default_factory=list)
    checks_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = copy_of(self.history.start)

    def run(
        self,
        deadline_s: float = 60.0,
        progress_timeout_s: float = 2.0,
        rate: float = 0.0,
        with_inner: bool = False,
    ) -> CaughtUp:
        self.checks_s = [time.monotonic()]
        return catch_up(
            self.state,
            run=RUN,
            peer="joiner",
            session_key=lambda: KEY,
            target=self.target or (lambda: target_of(self.history, self.donors, self.trusted)),
            want_snapshot=self._want,
            check=self._check,
            progress_timeout_s=progress_timeout_s,
            deadline_s=deadline_s,
            max_bytes_per_s=rate,
            with_inner=with_inner,
            note=self.notes.append,
            replayed=lambda update, data: self.replayed.append(update.version),
        )

    def longest_silence_s(self) -> float:
        """Between two checks."""
        return max(b - a for a, b in zip(self.checks_s, [*self.checks_s[1:], time.monotonic()], strict=True))

    def liars(self) -> list[str]:
        """Who was named for what it gave."""
        return [text.partition(" ")[0] for text in self.notes if "gave what is wrong" in text]

    def _want(self) -> None:
        self.wanted += 1
        self.want()

    def _check(self) -> None:
        self.checks_s.append(time.monotonic())
        self.during()
