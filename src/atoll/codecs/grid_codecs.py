"""Grid codecs in numpy: fp32, bf16, fp16, int8, int4, e3m0. Each value goes to a point of a grid and stays there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from atoll.codecs.block import BlockCodec, Bytes, Floats, as_bytes, pack, unpack
from atoll.values import CODECS

_SMALLEST_NORMAL = np.finfo(np.float32).tiny

# ---- floats ----


def _encode_fp32(values: Floats) -> Bytes:
    return as_bytes(values, "<f4")


def _decode_fp32(data: Bytes, numel: int) -> Floats:
    return data.view("<f4").astype(np.float32)


def _encode_bf16(values: Floats) -> Bytes:
    """Adding just under half, or half for an odd upper half, rounds half to even."""
    bits = values.view(np.uint32)
    return as_bytes((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, "<u2")


def _decode_bf16(data: Bytes, numel: int) -> Floats:
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _encode_fp16(values: Floats) -> Bytes:
    return as_bytes(values, "<f2")


def _decode_fp16(data: Bytes, numel: int) -> Floats:
    return data.view("<f2").astype(np.float32)


# ---- levels of a scale ----


def level_scale(absmax: np.float32, levels: int, cut_bits: int) -> np.float32:
    """absmax / levels with its low `cut_bits` bits cleared, or 0 where that would be subnormal.

    What is left fits, times a code, the 24 bits of an fp32: `code * scale` is exact, and encoding is idempotent.
    """
    bits = (np.float32(absmax) / np.float32(levels)).view(np.uint32) & np.uint32(
        0x100000000 - (1 << cut_bits)
    )
    scale = bits.view(np.float32)
    return scale if scale >= _SMALLEST_NORMAL else np.float32(0)


def _levels(values: Floats, scale: np.float32) -> NDArray[np.int8]:
    return np.rint(values * (np.float32(1) / scale)).astype(np.int8)


def _encode_int8(values: Floats) -> Bytes:
    scale = level_scale(np.abs(values).max(), 127, 7)
    codes = _levels(values, scale) if scale else np.zeros(len(values), np.int8)
    return np.concatenate([as_bytes(scale, "<f4"), codes.view(np.uint8)])


def _decode_int8(data: Bytes, numel: int) -> Floats:
    return data[4:].view(np.int8).astype(np.float32) * _scale(data)


def _encode_int4(values: Floats) -> Bytes:
    scale = level_scale(np.abs(values).max(), 7, 3)
    codes = _levels(values, scale) if scale else np.zeros(len(values), np.int8)
    return np.concatenate([as_bytes(scale, "<f4"), pack(codes & 15, 4)])


def _decode_int4(data: Bytes, numel: int) -> Floats:
    codes = unpack(data[4:], 4, numel).astype(np.int8)
    return np.where(codes < 8, codes, codes - 16).astype(np.float32) * _scale(data)


_E3M0_LEVELS = np.asarray([0, *(2.0**e for e in range(-6, 1))], np.float32)
_E3M0_MIDDLES = (_E3M0_LEVELS[1:] + _E3M0_LEVELS[:-1]) / 2
_E3M0_SMALLEST_SCALE = np.float32(2.0**-120)


def _encode_e3m0(values: Floats) -> Bytes:
    scale = np.abs(values).max()
    if scale < _E3M0_SMALLEST_SCALE:
        return np.zeros(CODECS["e3m0"].block_bytes(len(values)), np.uint8)
    ratio = values * (np.float32(1) / scale)
    codes = np.searchsorted(_E3M0_MIDDLES, np.abs(ratio), side="right")
    return np.concatenate([as_bytes(scale, "<f4"), pack(codes + 8 * ((codes > 0) & (ratio < 0)), 4)])


def _decode_e3m0(data: Bytes, numel: int) -> Floats:
    codes = unpack(data[4:], 4, numel)
    sign = np.where(codes & 8, np.float32(-1), np.float32(1))
    return sign * _E3M0_LEVELS[codes & 7] * _scale(data)


def _scale(data: Bytes) -> np.float32:
    return data[:4].view("<f4")[0].astype(np.float32)


def _codec(
    name: str,
    encode: Callable[[Floats], Bytes],
    decode: Callable[[Bytes, int], Floats],
    too_large: float = np.inf,
) -> BlockCodec:
    return BlockCodec(CODECS[name], encode, decode, too_large)


BLOCK_CODECS = (
    _codec("fp32", _encode_fp32, _decode_fp32),
    _codec("bf16", _encode_bf16, _decode_bf16, too_large=2.0**128 - 2.0**119),
    _codec("fp16", _encode_fp16, _decode_fp16, too_large=65520.0),
    _codec("int8", _encode_int8, _decode_int8),
    _codec("int4", _encode_int4, _decode_int4),
    _codec("e3m0", _encode_e3m0, _decode_e3m0),
)
