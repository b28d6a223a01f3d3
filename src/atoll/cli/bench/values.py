"""The vectors that are reduced, drawn alike wherever they are needed, and how far a result is from the exact mean."""

from __future__ import annotations

import numpy as np

from atoll.kernels import Floats

PERIOD = 1 << 20
"""A member's vector repeats after so many elements: 100 million are made in no time, and a sample stands for all."""


def period_of(index: int, seed: int) -> Floats:
    """What member `index` has, up to its period: normal, as pseudo-gradients roughly are, of size 1e-3."""
    generator = np.random.Generator(np.random.SFC64([seed, index]))
    return generator.standard_normal(PERIOD, dtype=np.float32) * np.float32(1e-3)


def fill(out: Floats, index: int, seed: int) -> None:
    period = period_of(index, seed)
    for start in range(0, len(out), PERIOD):
        part = out[start : start + PERIOD]
        part[:] = period[: len(part)]


def relative_error(mean: Floats, world: int, seed: int) -> float:
    """|mean - exact| / |exact| over the first and the last two periods (so, up to there, over all)."""
    exact = (
        sum((period_of(index, seed).astype(np.float64) for index in range(world)), np.zeros(PERIOD)) / world
    )
    starts = range(0, len(mean), PERIOD)
    wrong = true = 0.0
    for start in {*starts[:2], *starts[-2:]}:
        part = mean[start : start + PERIOD].astype(np.float64)
        wrong += float(np.sum((part - exact[: len(part)]) ** 2))
        true += float(np.sum(exact[: len(part)] ** 2))
    return float(np.sqrt(wrong / true))
