"""The native kernels under typed names: codecs, the mean, the outer step, digests.

Arrays are one-dimensional, contiguous and on the CPU, and never converted: a wrong dtype or stride, or an
output that is read-only, is a TypeError. Lengths that do not fit together are a ValueError with both numbers.
Every call gives up the interpreter lock while it computes, so other Python threads run.

`boundaries` are a `Grid`'s (int64, from 0 to the number of elements); `codec` names one of `values.CODECS`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

try:
    from atoll import _native
except ImportError as error:
    raise ImportError(
        f"the native core of atoll is not built ({error}); run `make setup` or `pip install .`"
    ) from error

PIECE: Final = 1 << 20
"""Elements of global coordinates that share one row of the digest table."""

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Int64s = NDArray[np.int64]
Table = NDArray[np.uint64]


def encode(codec: str, boundaries: Int64s, values: Floats, out: Bytes) -> bool:
    """Write `values` to `out` as wire bytes. False, with `out` unspecified, if a value is not finite, or too large for
    the codec (bf16, fp16)."""
    return _native.encode(codec, boundaries, values, out)


def decode(codec: str, boundaries: Int64s, data: Bytes, out: Floats) -> None:
    """Read wire bytes back into `out`."""
    _native.decode(codec, boundaries, data, out)


def encode_with_feedback(
    codec: str, boundaries: Int64s, delta: Floats, residual: Floats, beta: float, out: Bytes
) -> bool:
    """`encode` of delta + beta * residual, in one pass and without a buffer for the sum. Changes only `out`."""
    return _native.encode_with_feedback(codec, boundaries, delta, residual, beta, out)


def update_residual(
    codec: str, boundaries: Int64s, delta: Floats, beta: float, data: Bytes, residual: Floats
) -> None:
    """In place: residual = delta + beta * residual - what `data` decodes to.

    `data` is what `encode_with_feedback` made of the same `delta`, `beta` and `residual`.
    """
    _native.update_residual(codec, boundaries, delta, beta, data, residual)


def weighted_mean(
    codec: str, boundaries: Int64s, contributions: Sequence[Bytes], weights: Sequence[int], out: Bytes
) -> bool:
    """The reduction formula on whole vectors, to the bit what the engine computes per chunk.

    Contributions are added in the order given, those of weight 0 left out; a single one is copied. `out` may be one
    of them. False, with `out` unspecified, if the mean is not finite. ValueError if the weights sum to zero.
    """
    return _native.weighted_mean(codec, boundaries, list(contributions), list(weights), out)


def outer_step(
    anchor: Floats, velocity: Floats, mean: Floats, lr: float, momentum: float, nesterov: bool = True
) -> None:
    """One step of outer SGD, in place, in plain fp32: `lr` and `momentum` are rounded once, nothing fused.

    velocity = momentum * velocity + mean; anchor -= lr * (mean + momentum * velocity), or lr * velocity
    without Nesterov. Without momentum: anchor -= lr * mean, and `velocity` is left alone.
    """
    _native.outer_step(anchor, velocity, mean, lr, momentum, nesterov)


def squared_norm(values: Floats) -> float:
    """Sum of squares in fp64, in the same order on every machine. Not finite if any value is not."""
    return _native.squared_norm(values)


def digest_pieces(values: Floats, start: int = 0, piece: int = PIECE) -> Table:
    """A (pieces, 2) table of 64-bit sums, one row per piece that [start, start + len(values)) touches.

    Row 0 is piece `start // piece`. Rows of disjoint ranges add up (modulo 2^64) to the row of their union,
    so ranks with any cuts agree on one table.
    """
    return _native.digest_pieces(values, start, piece)


def digest_bytes(data: Bytes) -> bytes:
    """16 bytes that depend on every byte and its position. Finds accidents, not forgeries."""
    return _native.digest_bytes(data)


def result_digest(routes: Sequence[bytes]) -> str:
    """The digest of an op's bytes, in hex, from those of its routes, one after the other; of one route, its own."""
    return (routes[0] if len(routes) == 1 else hashlib.sha256(b"".join(routes)).digest()[:16]).hex()


def state_digest(tables: Iterable[Table]) -> str:
    """The digest of a state: SHA-256, in hex, over its digest tables one after the other."""
    sha = hashlib.sha256()
    for table in tables:
        sha.update(np.ascontiguousarray(table, dtype="<u8").tobytes())
    return sha.hexdigest()


def kernel_target() -> str:
    """Which instruction set the kernels run on here: "x86-64-v3", "baseline", ... The bits do not depend on it."""
    return _native.kernel_target()
