"""Vectors to try codecs on, and the kernels with their buffers made for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from atoll import kernels
from atoll.codecs.laws import largest_value
from atoll.plan.grid import Grid

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Vector = tuple[list[int], Floats]

SIZES = (0, 1, 7, 13, 255, 256, 257, 1023, 4097)
HUGE = float(np.finfo(np.float32).max)


def encode(codec: str, segments: Sequence[int], values: Floats) -> Bytes | None:
    grid = Grid.of(segments)
    out = np.full(grid.wire_bytes(codec), 0xA5, np.uint8)
    return out if kernels.encode(codec, grid.boundaries, values, out) else None


def encoded(codec: str, segments: Sequence[int], values: Floats) -> Bytes:
    data = encode(codec, segments, values)
    assert data is not None
    return data


def decode(codec: str, segments: Sequence[int], data: Bytes) -> Floats:
    grid = Grid.of(segments)
    out = np.full(grid.numel, np.nan, np.float32)
    kernels.decode(codec, grid.boundaries, data, out)
    return out


def there_and_back(codec: str, segments: Sequence[int], values: Floats) -> Floats:
    return decode(codec, segments, encoded(codec, segments, values))


def mean_of(
    codec: str, segments: Sequence[int], contributions: Sequence[Bytes], weights: Sequence[int]
) -> Bytes | None:
    grid = Grid.of(segments)
    out = np.empty(grid.wire_bytes(codec), np.uint8)
    return out if kernels.weighted_mean(codec, grid.boundaries, contributions, weights, out) else None


def same_bits(a: Floats, b: Floats) -> bool:
    return a.dtype == b.dtype == np.float32 and a.tobytes() == b.tobytes()


def relative_error(found: Floats, wanted: NDArray[np.floating]) -> float:
    wide = wanted.astype(np.float64)
    return float(np.linalg.norm(found - wide) / np.linalg.norm(wide))


def within(codec: str, values: Floats) -> Floats:
    """`values`, cut off where the codec would refuse them."""
    limit = np.float32(largest_value(codec))
    return np.clip(values, -limit, limit)


def finite_bits(rng: np.random.Generator, size: int) -> Floats:
    """Any finite bit pattern: all exponents, denormals and both zeros."""
    bits = rng.integers(0, 1 << 32, size, dtype=np.uint32).view(np.float32)
    return np.where(np.isfinite(bits), bits, np.float32(0))


def draw_values(kind: str, exponent: int, seed: int, size: int) -> Floats:
    rng = np.random.default_rng(seed)
    if kind == "bits":
        return finite_bits(rng, size)
    if kind == "codes":  # an absmax of 127 levels, half-way points between levels, many equal magnitudes
        values = rng.integers(-254, 255, size).astype(np.float32) / 2
    elif kind == "sparse":
        values = rng.standard_normal(size, np.float32) * (rng.random(size) < 0.1)
    else:
        values = rng.standard_normal(size, np.float32)
    with np.errstate(over="ignore", under="ignore"):
        return np.clip(np.ldexp(values, exponent), -HUGE, HUGE).astype(np.float32)


vectors = st.builds(
    lambda segments, kind, exponent, seed: (segments, draw_values(kind, exponent, seed, sum(segments))),
    st.lists(st.sampled_from(SIZES), min_size=1, max_size=4),
    st.sampled_from(("normal", "sparse", "codes", "bits")),
    st.one_of(st.integers(-12, 4), st.integers(-149, 127)),
    st.integers(0, 2**32 - 1),
)
single_blocks = st.lists(
    st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9
).map(lambda values: ([len(values)], np.asarray(values, np.float32)))
any_vector = st.one_of(vectors, single_blocks)
