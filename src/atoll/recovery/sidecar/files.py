"""What a request may name: the listing, or one of the few kinds of files in the staging folder.

Everything else is nothing. Whole patterns are matched, and digits are all that is free in them, so no name leads out of
the folder.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from atoll.recovery.held import SNAPSHOTS

_HELD = re.compile(r"/v1/held/(-1|\d{1,15})")
_FILE = re.compile(
    r"/v1/(snapshots/\d{1,15}-\d{1,15}/(?:(?:manifest|inner)\.json|(?:shard-\d{5}|inner)\.safetensors)"
    r"|updates/\d{1,15}-\d{1,15}\.(?:json|bin))"
)
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")


class NotThereError(Exception):
    """There is no such file, or not any more."""


class BadRangeError(Exception):
    """The range is not of the one kind that is served, or not within the file."""


def listing_after(target: str) -> int | None:
    """The version after which updates are asked for, if this asks for the listing."""
    found = _HELD.fullmatch(target)
    return int(found[1]) if found else None


@dataclass(slots=True)
class Opened:
    """Part of a file, from `offset` on. A slot's bytes are those of its name only as long as the name is there."""

    path: Path
    fd: int
    offset: int
    size_bytes: int
    total_bytes: int
    in_slot: bool

    def read(self, done: int, num_bytes: int) -> bytes:
        """Bytes of the part, from its byte `done` on. Raises NotThereError if they may be another snapshot's."""
        data = os.pread(self.fd, min(num_bytes, self.size_bytes - done), self.offset + done)
        # A slot loses its name before it is written again: if the name is there now, the bytes are its own.
        if not data or (self.in_slot and not self.path.exists()):
            raise NotThereError
        return data

    def close(self) -> None:
        os.close(self.fd)


def open_part(folder: Path, target: str, byte_range: str) -> Opened:
    """Raises NotThereError or BadRangeError. `byte_range` is a Range header, "" for the whole file."""
    found = _FILE.fullmatch(target)
    if not found:
        raise NotThereError
    path = folder / found[1]
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        raise NotThereError from None
    try:
        total = os.fstat(fd).st_size
        offset, size = _part(byte_range, total)
    except BaseException:
        os.close(fd)
        raise
    return Opened(path, fd, offset, size, total, in_slot=found[1].startswith(SNAPSHOTS))


def _part(byte_range: str, total: int) -> tuple[int, int]:
    if not byte_range:
        return 0, total
    found = _RANGE.fullmatch(byte_range)
    if not found:
        raise BadRangeError
    first, last = int(found[1]), int(found[2])
    if not first <= last < total:
        raise BadRangeError
    return first, last + 1 - first
