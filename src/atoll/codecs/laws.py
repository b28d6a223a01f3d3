"""What the codecs promise.

*Grid codecs* are odd (-x decodes to minus what x does), keep 0, encode a decoded vector to the same bytes, and each
element is off by at most `error_bound`. *Codebook codecs* keep the zero vector, never lengthen a block
(|x - x'|^2 = |x|^2 - |x'|^2), and on a given distribution have a measured error, `MEASURED_ERROR`; what they drop is
meant to be sent later, by error feedback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from atoll.values import CODECS

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

GRID_CODECS: Final = ("fp32", "bf16", "fp16", "int8", "int4", "e3m0")
CODEBOOK_CODECS: Final = ("stat2", "topk", "topk256")

MEASURED_ERROR: Final[dict[str, tuple[float, float, float]]] = {
    "fp32": (0.0, 0.0, 0.0),
    "bf16": (0.00166, 0.00166, 0.00165),
    "fp16": (0.00021, 0.00021, 0.00021),
    "int8": (0.0070, 0.0100, 0.0172),
    "int4": (0.1262, 0.1784, 0.2737),
    "e3m0": (0.1945, 0.1895, 0.1734),
    "stat2": (0.4225, 0.4590, 0.5780),
    "topk": (0.9392, 0.8898, 0.8231),
    "topk256": (0.8264, 0.7491, 0.7605),
}
"""|x - x'| / |x| of a long vector of independent values, by distribution: normal, Laplace, Student with 3 degrees of
freedom (docs/codecs.md)."""

_TINY = float(np.finfo(np.float32).tiny)


_LARGEST = {"fp16": 65504.0, "bf16": 2.0**128 - 2.0**120}


def largest_value(codec: str) -> float:
    """The largest magnitude that `codec` takes for sure; bf16 and fp16 refuse what would round to infinity."""
    return _LARGEST.get(codec, float(np.finfo(np.float32).max))


def error_bound(codec: str, segments: Sequence[int], values: Floats) -> Doubles:
    """For each element, the largest |value - decoded value| that a grid codec allows."""
    sizes = np.abs(values.astype(np.float64))
    return _BOUNDS[codec](sizes, _block_maxima(CODECS[codec].block, segments, sizes))


def _no_error(sizes: Doubles, block_maxima: Doubles) -> Doubles:
    return np.zeros_like(sizes)


def _half_a_unit(bits: int, smallest: float) -> Callable[[Doubles, Doubles], Doubles]:
    """Half a unit in the last of `bits` places; half of `smallest` where units shrink no more."""
    return lambda sizes, block_maxima: np.maximum(sizes * 2.0**-bits, smallest / 2)


def _half_a_level(levels: int) -> Callable[[Doubles, Doubles], Doubles]:
    """Half a level of the block's absmax; blocks too small for a normal scale become zero altogether."""

    def bound(sizes: Doubles, block_maxima: Doubles) -> Doubles:
        level = block_maxima / levels
        # Rounding may push a quotient just below `tiny` up to it, and cutting the scale one above it below.
        vanished = level < _TINY * (1 + 2.0**-16)
        # x / scale is computed as x * fl(1 / scale): at most 2^-16 of a level away from the exact quotient.
        return np.where(vanished, block_maxima, level / 2 * (1 + 2.0**-15))

    return bound


def _nearest_power(sizes: Doubles, block_maxima: Doubles) -> Doubles:
    """A third of the value, between two powers of two; half the lowest level below that."""
    near = np.where(sizes >= block_maxima / 64, sizes / 3, block_maxima / 128)
    return np.where(block_maxima < 2.0**-120, block_maxima, near * (1 + 2.0**-20))


def _block_maxima(block: int, segments: Sequence[int], sizes: Doubles) -> Doubles:
    """For each element, the largest magnitude in its block."""
    maxima = np.empty(len(sizes))
    start = 0
    for size in segments:
        for first in range(start, start + size, block):
            part = slice(first, min(first + block, start + size))
            maxima[part] = sizes[part].max()
        start += size
    return maxima


_BOUNDS: dict[str, Callable[[Doubles, Doubles], Doubles]] = {
    "fp32": _no_error,
    "bf16": _half_a_unit(8, 2.0**-133),
    "fp16": _half_a_unit(11, 2.0**-24),
    "int8": _half_a_level(127),
    "int4": _half_a_level(7),
    "e3m0": _nearest_power,
}
