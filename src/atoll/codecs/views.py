"""fp32 on the wire is fp32 in memory: a vector can be sent, and its mean used, without a copy."""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def is_plain(codec: str) -> bool:
    """Whether the codec's wire bytes are the values' own bytes on this machine."""
    return codec == "fp32" and sys.byteorder == "little"


def wire_view(values: Floats) -> Bytes:
    """The values (contiguous) as a plain codec's wire bytes; the same memory."""
    return values.view(np.uint8)


def value_view(data: Bytes) -> Floats:
    """A plain codec's wire bytes as the values; the same memory."""
    return data.view(np.float32)
