"""What a codec is to the reference: how one block becomes bytes, and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.values import CodecSpec

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class BlockCodec:
    """`encode` takes at most `spec.block` values below `too_large`; `decode` takes their bytes and their number."""

    spec: CodecSpec
    encode: Callable[[Floats], Bytes]
    decode: Callable[[Bytes, int], Floats]
    too_large: float = math.inf


def as_bytes(values: object, dtype: str) -> Bytes:
    """The little-endian bytes of `values` as `dtype`."""
    return np.atleast_1d(np.asarray(values)).astype(dtype).view(np.uint8)


def pack(codes: NDArray[np.integer], bits: int) -> Bytes:
    """Codes of `bits` bits as one stream, the first code and its low bit first; the last byte is filled up with 0."""
    stream = (codes.astype(np.uint32)[:, None] >> np.arange(bits, dtype=np.uint32)) & 1
    return np.packbits(stream.astype(np.uint8).ravel(), bitorder="little")


def unpack(data: Bytes, bits: int, count: int) -> NDArray[np.uint32]:
    """The first `count` codes of a stream that `pack` wrote."""
    stream = np.unpackbits(data, count=count * bits, bitorder="little").reshape(count, bits)
    return (stream.astype(np.uint32) << np.arange(bits, dtype=np.uint32)).sum(axis=1, dtype=np.uint32)
