"""What of a save or a snapshot lies on other ranks of the peer: how whoever makes the file has them write it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Put = Callable[[Path, int, int], None]
"""Has all ranks write their part of the shared state into this file, the anchor from one byte on and the velocity from
the other. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """So many bytes that lie on other ranks: `put` has them written into the file, from this position on. Raises
    OSError."""

    nbytes: int
    put: Callable[[Path, int], None]


OwnBytes = memoryview | Elsewhere
"""A part of a file."""
