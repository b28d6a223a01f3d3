"""The 8-bit codec of the INTELLECT-1 run, for the comparison in docs/codecs.md only: no run can choose it.

256 bins of equal width cover 3 standard deviations to both sides; all beyond falls into the outermost ones. A value
decodes to the mean of its bin. The codebook (256 fp32) covers a whole tensor or chunk, so heavy tails are cut off, and
two passes are needed. (Jaghouar et al. 2024, arXiv 2412.01152.)
"""

from __future__ import annotations

import numpy as np

from atoll.codecs.block import Bytes, Floats, as_bytes

BINS = 256
_CODEBOOK_BYTES = 4 * BINS


def encode(values: Floats) -> Bytes:
    """The codebook, then a byte per element."""
    width = np.float32(6 * values.std(dtype=np.float64) / BINS)
    centred = values / width if width else np.zeros_like(values)
    codes = np.clip(np.rint(centred) + BINS // 2, 0, BINS - 1).astype(np.uint8)
    sums = np.bincount(codes, weights=values, minlength=BINS)
    counts = np.bincount(codes, minlength=BINS)
    return np.concatenate([as_bytes(sums / np.maximum(counts, 1), "<f4"), codes])


def decode(data: Bytes) -> Floats:
    """The fp32 values that `data` stands for."""
    codebook = data[:_CODEBOOK_BYTES].view("<f4").astype(np.float32)
    return codebook[data[_CODEBOOK_BYTES:]]
