"""What a codec promises: the largest possible difference between a value and what it decodes to.

All codecs here are *grid codecs*: odd (-x decodes to minus what x does), 0 stays 0, encoding a decoded vector
gives the same bytes, and each element is off by at most `error_bound`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.values import CODECS

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

INT8_LEVELS = 127
# x / scale is computed as x * fl(1 / scale): at most 2^-16 of a level away from the exact quotient.
_INT8_ROUNDING = 1 + 2.0**-15


def error_bound(codec: str, segments: Sequence[int], values: Floats) -> Doubles:
    """For each element, the largest |value - decoded value| that the codec allows."""
    return _BOUNDS[codec](_block_maxima(CODECS[codec].block, segments, values))


def _no_error(block_maxima: Doubles) -> Doubles:
    return np.zeros_like(block_maxima)


def _half_a_level(block_maxima: Doubles) -> Doubles:
    """Half a level of the block's absmax; blocks too small for a normal scale become zero altogether."""
    level = block_maxima / INT8_LEVELS
    tiny = np.finfo(np.float32).tiny
    # Rounding may push a quotient just below `tiny` up to it, hence the margin.
    vanished = level < tiny * (1 + 2.0**-16)
    return np.where(vanished, block_maxima, level / 2 * _INT8_ROUNDING)


def _block_maxima(block: int, segments: Sequence[int], values: Floats) -> Doubles:
    """For each element, the largest magnitude in its block."""
    maxima = np.empty(len(values), np.float64)
    start = 0
    for size in segments:
        for first in range(start, start + size, block):
            part = slice(first, min(first + block, start + size))
            maxima[part] = np.abs(values[part]).max()
        start += size
    return maxima


_BOUNDS: dict[str, Callable[[Doubles], Doubles]] = {"fp32": _no_error, "int8": _half_a_level}
