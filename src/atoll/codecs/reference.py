"""The codecs and the reduction formula in numpy: what the native kernels are tested against, to the bit.

Written to be read, not to be fast. A vector is cut into segments, a segment into blocks of `spec.block`
elements; wire bytes are block after block. `segments` are sizes in elements; empty ones are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.values import CODECS, CodecSpec

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_SMALLEST_NORMAL = np.finfo(np.float32).tiny


@dataclass(frozen=True)
class BlockCodec:
    """How one block of at most `spec.block` finite elements becomes bytes, and back."""

    spec: CodecSpec
    encode: Callable[[Floats], Bytes]
    decode: Callable[[Bytes], Floats]


def encode(codec: str, segments: Sequence[int], values: Floats) -> Bytes | None:
    """Wire bytes of `values`, or None if a value is not finite."""
    if not np.isfinite(values).all():
        return None
    block_codec = BLOCK_CODECS[codec]
    encoded = [block_codec.encode(values[block]) for block, _ in _blocks(block_codec.spec, segments)]
    return np.concatenate([np.empty(0, np.uint8), *encoded])


def decode(codec: str, segments: Sequence[int], data: Bytes) -> Floats:
    """The fp32 values that `data` stands for."""
    block_codec = BLOCK_CODECS[codec]
    decoded = [block_codec.decode(data[part]) for _, part in _blocks(block_codec.spec, segments)]
    return np.concatenate([np.empty(0, np.float32), *decoded])


def weighted_mean(
    codec: str, segments: Sequence[int], contributions: Sequence[Bytes], weights: Sequence[int]
) -> Bytes | None:
    """Add weight * x in the order given, divide by the sum of weights, encode; None if not finite.

    Every operation is rounded to fp32 by itself, weights and their sum included.
    """
    total: Floats = np.zeros(sum(segments), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for data, weight in zip(contributions, weights, strict=True):
            total += _to_fp32(weight) * decode(codec, segments, data)
        total /= _to_fp32(sum(weights))
    return encode(codec, segments, total)


def _to_fp32(weight: int) -> np.float32:
    """Rounded once: `np.float32(int)` would go through fp64 and round twice."""
    return np.uint64(weight).astype(np.float32)


def _encode_fp32(values: Floats) -> Bytes:
    return values.astype("<f4").view(np.uint8)


def _decode_fp32(data: Bytes) -> Floats:
    return data.view("<f4").astype(np.float32)


def _encode_int8(values: Floats) -> Bytes:
    scale = int8_scale(np.abs(values).max())
    if scale == 0:
        return np.zeros(4 + len(values), np.uint8)
    codes = np.rint(values * (np.float32(1) / scale)).astype(np.int8)
    return np.concatenate([np.asarray([scale], "<f4").view(np.uint8), codes.view(np.uint8)])


def _decode_int8(data: Bytes) -> Floats:
    scale = data[:4].view("<f4")[0].astype(np.float32)
    return data[4:].view(np.int8).astype(np.float32) * scale


def int8_scale(absmax: np.float32) -> np.float32:
    """The scale of an int8 block: absmax / 127 cut to 17 significant bits, or 0 where it would be subnormal.

    17 bits times a code of 7 fit the 24 of an fp32: `code * scale` is exact, and encoding is idempotent.
    """
    bits = (np.float32(absmax) / np.float32(127)).view(np.uint32) & np.uint32(0xFFFFFF80)
    scale = bits.view(np.float32)
    return scale if scale >= _SMALLEST_NORMAL else np.float32(0)


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


BLOCK_CODECS: dict[str, BlockCodec] = {
    "fp32": BlockCodec(CODECS["fp32"], _encode_fp32, _decode_fp32),
    "int8": BlockCodec(CODECS["int8"], _encode_int8, _decode_int8),
}
