"""How long rounds are and which outer step ends them: pure functions of the run's inner step.

A run may start *tight*: stages of short rounds that only average (outer lr 1, no momentum), then long rounds with
Nesterov momentum. From random weights the first phase decides more than anything else (DiLoCo's outer momentum is
warm only after about 1/(1-momentum) rounds).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundShape:
    """One round: its length in inner steps, and the outer step at its end."""

    inner_steps: int
    lr: float
    momentum: float
    nesterov: bool


@dataclass(frozen=True, slots=True)
class Stage:
    """Rounds of `inner_steps` up to the run's step `until` (None: to the end)."""

    inner_steps: int
    lr: float
    momentum: float
    until: int | None = None


@dataclass(frozen=True, slots=True)
class OuterSchedule:
    """Stages in order; the last has no end. `total_steps` None: the run has no last step."""

    stages: tuple[Stage, ...]
    nesterov: bool = True
    total_steps: int | None = None

    @staticmethod
    def constant(
        inner_steps: int, lr: float, momentum: float, nesterov: bool = True, total_steps: int | None = None
    ) -> OuterSchedule:
        return OuterSchedule((Stage(inner_steps, lr, momentum),), nesterov, total_steps)

    @staticmethod
    def of(
        stages: Sequence[tuple[int, int, float | None, float | None]],
        lr: float,
        momentum: float,
        nesterov: bool = True,
        total_steps: int | None = None,
    ) -> OuterSchedule:
        """From rows of (until, inner_steps, lr, momentum); a missing lr or momentum is plain averaging, except in
        the last row, where it is the run's own."""
        last = len(stages) - 1
        made = tuple(
            Stage(
                inner_steps=inner_steps,
                lr=stage_lr if stage_lr is not None else (lr if i == last else 1.0),
                momentum=stage_momentum if stage_momentum is not None else (momentum if i == last else 0.0),
                until=None if i == last else until,
            )
            for i, (until, inner_steps, stage_lr, stage_momentum) in enumerate(stages)
        )
        return OuterSchedule(made, nesterov, total_steps)

    def finished(self, step: int) -> bool:
        return self.total_steps is not None and step >= self.total_steps

    def round_at(self, step: int) -> RoundShape:
        """The round that begins at the run's `step`; shorter where a stage or the run ends inside it."""
        stage = next(s for s in self.stages if s.until is None or step < s.until)
        length = stage.inner_steps
        for end in (stage.until, self.total_steps):
            if end is not None:
                length = min(length, end - step)
        return RoundShape(max(length, 1), stage.lr, stage.momentum, self.nesterov)
