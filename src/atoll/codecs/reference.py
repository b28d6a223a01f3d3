"""The codecs and the reduction formula in numpy: what the native kernels are tested against, to the bit.

Written to be read, not to be fast; the formats are described in docs/codecs.md. A vector is cut into segments, a
segment into blocks of `spec.block` elements; wire bytes are block after block. `segments` are sizes in elements; empty
ones are allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from atoll.codecs import codebook_codecs, grid_codecs
from atoll.codecs.block import BlockCodec, Bytes, Floats
from atoll.values import CodecSpec

BLOCK_CODECS: dict[str, BlockCodec] = {
    codec.spec.name: codec for codec in (*grid_codecs.BLOCK_CODECS, *codebook_codecs.BLOCK_CODECS)
}


def encode(codec: str, segments: Sequence[int], values: Floats) -> Bytes | None:
    """Wire bytes of `values`, or None if a value is not finite, or would not be once encoded."""
    block_codec = BLOCK_CODECS[codec]
    if not np.isfinite(values).all() or (len(values) and np.abs(values).max() >= block_codec.too_large):
        return None
    encoded = [block_codec.encode(values[block]) for block, _ in _blocks(block_codec.spec, segments)]
    return np.concatenate([np.empty(0, np.uint8), *encoded])


def decode(codec: str, segments: Sequence[int], data: Bytes) -> Floats:
    """The fp32 values that `data` stands for."""
    block_codec = BLOCK_CODECS[codec]
    decoded = [
        block_codec.decode(data[part], block.stop - block.start)
        for block, part in _blocks(block_codec.spec, segments)
    ]
    return np.concatenate([np.empty(0, np.float32), *decoded])


def weighted_mean(
    codec: str, segments: Sequence[int], contributions: Sequence[Bytes], weights: Sequence[int]
) -> Bytes | None:
    """Add weight * x in the order given, divide by the sum of weights, encode; None if not finite.

    Every operation is rounded to fp32 by itself, weights and their sum included. Contributions of weight 0 are left
    out; a single one is copied, if what it decodes to is finite.
    """
    counted = [pair for pair in zip(contributions, weights, strict=True) if pair[1]]
    if len(counted) == 1:
        data = counted[0][0]
        return data if np.isfinite(decode(codec, segments, data)).all() else None
    total: Floats = np.zeros(sum(segments), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for data, weight in counted:
            total += _to_fp32(weight) * decode(codec, segments, data)
        total /= _to_fp32(sum(weights))
    return encode(codec, segments, total)


def with_residual(delta: Floats, residual: Floats, beta: float) -> Floats:
    """What is encoded under error feedback: delta + beta * residual."""
    with np.errstate(over="ignore"):
        return np.add(delta, np.multiply(np.float32(beta), residual), dtype=np.float32)


def next_residual(
    codec: str, segments: Sequence[int], delta: Floats, residual: Floats, beta: float, data: Bytes
) -> Floats:
    """What `data`, the encoded delta + beta * residual, did not carry."""
    return with_residual(delta, residual, beta) - decode(codec, segments, data)


def _to_fp32(weight: int) -> np.float32:
    """Rounded once: `np.float32(int)` would go through fp64 and round twice."""
    return np.uint64(weight).astype(np.float32)


def _blocks(spec: CodecSpec, segments: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """For each block: which elements it holds, and which bytes."""
    element = byte = 0
    for size in segments:
        end = element + size
        while element < end:
            numel = min(spec.block, end - element)
            yield slice(element, element + numel), slice(byte, byte + spec.block_bytes(numel))
            element += numel
            byte += spec.block_bytes(numel)
