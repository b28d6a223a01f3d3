"""Orders that depend on a seed and nothing else.

numpy's generators may change their streams from one version to the next, and peers must agree. So the sort
key of item `i` is the `i`-th output of SplitMix64 (Steele, Lea, Flood 2014), started from the seed: plain
integer arithmetic.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)

Words = npt.NDArray[np.uint64]


def shuffled(count: int, *key: int) -> npt.NDArray[np.int64]:
    """A permutation of `range(count)`, the same for the same key (integers in [0, 2^64)) on every machine."""
    start = np.zeros(1, dtype=np.uint64)
    for part in key:
        start = _mix(start + _GAMMA + np.array([part], dtype=np.uint64))
    keys = _mix(start + np.arange(1, count + 1, dtype=np.uint64) * _GAMMA)
    return np.argsort(keys, kind="stable")


def _mix(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
