"""The inner learning rate, a pure function of the run's step.

The step is the run's (the same number on all peers), never a local counter: a peer that joins late, skips a
batch or starts again has the others' learning rate. Step 0 is the first. The rate rises linearly over
`warmup_steps` and reaches the peak at step `warmup_steps - 1`. A decay reaches its floor, `min_lr_ratio` of
the peak, at step `total_steps`, one past the last, so that no step is spent at a floor of zero. Later steps
stay on the floor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["cosine", "wsd", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LRSchedule:
    """Warm-up, then `cosine`, `wsd` (level, then falling over the last `decay_fraction`) or `constant`."""

    kind: Kind
    peak_lr: float
    total_steps: int
    warmup_steps: int = 0
    decay_fraction: float = 0.2
    min_lr_ratio: float = 0.0

    def __call__(self, step: int) -> float:
        """The learning rate of the step with index `step`."""
        return self.peak_lr * self._factor(step)

    def _factor(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        match self.kind:
            case "constant":
                return 1.0
            case "cosine":
                progress = _progress(step, self.warmup_steps, self.total_steps)
                return _between(self.min_lr_ratio, (1 + math.cos(math.pi * progress)) / 2)
            case "wsd":
                decay_start = self.total_steps - round(self.decay_fraction * self.total_steps)
                progress = _progress(step, max(decay_start, self.warmup_steps), self.total_steps)
                return _between(self.min_lr_ratio, 1 - progress)


def _progress(step: int, start: int, stop: int) -> float:
    """How far `step` is from `start` to `stop`, cut off at 0 and 1."""
    if step <= start:
        return 0.0
    return min(1.0, (step - start) / (stop - start)) if start < stop else 1.0


def _between(floor: float, share: float) -> float:
    """`floor` at share 0, one at share 1."""
    return floor + (1 - floor) * share
