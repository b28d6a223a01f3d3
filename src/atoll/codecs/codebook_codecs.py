"""Codebook codecs in numpy: stat2 and topk. A block has up to four values of its own, the means of its elements."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.codecs.block import BlockCodec, Bytes, Floats, as_bytes, pack, unpack
from atoll.values import CODECS, CodecSpec

Codes = NDArray[np.uint32]

_LANES = 8
_CODEBOOK_BYTES = 16
_POSITION_BITS = 12
_EDGES = (-2.25, -0.75, 0.75)


def quantise(values: Floats) -> tuple[Floats, Codes]:
    """The codebook (4 values) and a code per element: how many of mean + (-2.25, -0.75, 0.75) deviations it exceeds."""
    count = len(values)
    wide = values.astype(np.float64)
    mean = ordered_sum(wide) / count
    variance = ordered_sum(wide * wide) / count - mean * mean
    deviation = np.sqrt(max(variance, 0.0))
    with np.errstate(over="ignore"):  # a threshold above all of fp32 is infinity: nothing exceeds it
        thresholds = [np.float32(mean + edge * deviation) for edge in _EDGES]
    above = [values > threshold for threshold in thresholds]
    sums = [ordered_sum(wide), *(ordered_sum(np.where(mask, wide, 0.0)) for mask in above), 0.0]
    numbers = [count, *(int(mask.sum()) for mask in above), 0]
    codebook = np.zeros(4, np.float32)
    for code in range(4):
        number = numbers[code] - numbers[code + 1]
        if number:
            codebook[code] = (sums[code] - sums[code + 1]) / number
    return codebook, above[0].astype(np.uint32) + above[1] + above[2]


def ordered_sum(wide: NDArray[np.float64]) -> float:
    """In the kernels' order: element i in sum i % 8, the eight sums added pairwise."""
    lanes = np.zeros(_LANES)
    for start in range(0, len(wide), _LANES):
        part = wide[start : start + _LANES]
        lanes[: len(part)] += part
    while len(lanes) > 1:
        lanes = lanes[::2] + lanes[1::2]
    return float(lanes[0])


def largest(values: Floats, count: int) -> NDArray[np.int64]:
    """Positions, rising, of the `count` largest magnitudes; of equal ones the first."""
    order = np.argsort(-np.abs(values), kind="stable")
    return np.sort(order[:count])


def _encode_stat2(values: Floats) -> Bytes:
    codebook, codes = quantise(values)
    return np.concatenate([as_bytes(codebook, "<f4"), pack(codes, 2)])


def _decode_stat2(data: Bytes, numel: int) -> Floats:
    return _codebook(data)[unpack(data[_CODEBOOK_BYTES:], 2, numel)]


def _topk(spec: CodecSpec) -> BlockCodec:
    def encode(values: Floats) -> Bytes:
        positions = largest(values, spec.kept)
        codebook, codes = quantise(values[positions])
        entries = positions.astype(np.uint32) | codes << _POSITION_BITS
        return np.concatenate([as_bytes(codebook, "<f4"), pack(entries, spec.bits)])

    def decode(data: Bytes, numel: int) -> Floats:
        entries = unpack(data[_CODEBOOK_BYTES:], spec.bits, min(numel, spec.kept))
        values = np.zeros(numel, np.float32)
        values[entries & ((1 << _POSITION_BITS) - 1)] = _codebook(data)[entries >> _POSITION_BITS]
        return values

    return BlockCodec(spec, encode, decode)


def _codebook(data: Bytes) -> Floats:
    return data[:_CODEBOOK_BYTES].view("<f4").astype(np.float32)


BLOCK_CODECS = (
    BlockCodec(CODECS["stat2"], _encode_stat2, _decode_stat2),
    _topk(CODECS["topk"]),
    _topk(CODECS["topk256"]),
)
