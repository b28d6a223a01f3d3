"""What a peer did since it last adopted an anchor: what its update will count, and what is told of it.

`OuterLoop` owns it and counts; a round only reads it. Used on the training thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Work:
    """What a peer did since it last adopted an anchor."""

    steps: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    losses: int = 0
    bad_losses: int = 0
    train_s: float = 0.0

    def add(self, tokens: int, loss: float | None) -> None:
        self.steps += 1
        self.tokens += tokens
        if loss is not None and math.isfinite(loss):
            self.loss_sum += loss
            self.losses += 1
        elif loss is not None:
            self.bad_losses += 1

    @property
    def mean_loss(self) -> float:
        return self.loss_sum / self.losses if self.losses else math.nan
