"""The update log: the latest commits of a peer, each as a head and its finished bytes, in the staging folder.

The log is one stretch without a gap: version after version up to the newest that was kept. Something that does not
follow begins a new one. The bytes are published first, then the head, by renames; so where a head is, its bytes are.
"""

from __future__ import annotations

import errno
import itertools
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atoll import log
from atoll.kernels import Bytes
from atoll.recovery.held import UPDATES, HeldUpdate
from atoll.recovery.update import Update, head_of

_log = log.get(__name__)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class _Entry:
    held: HeldUpdate
    file_bytes: int


class UpdateLog:
    """Keeps at most `keep_bytes`; up to `pin_bytes` while the oldest is what a staged snapshot needs first."""

    def __init__(self, folder: Path, keep_bytes: int, pin_bytes: int) -> None:
        self._folder, self._keep_bytes, self._pin_bytes = folder, keep_bytes, max(keep_bytes, pin_bytes)
        (folder / UPDATES).mkdir(exist_ok=True)
        self._entries: deque[_Entry] = deque()  # oldest first
        self._generation = itertools.count(1)
        self._total_bytes = 0
        self._full = False

    @property
    def versions(self) -> range:
        """The versions that the kept updates made."""
        if not self._entries:
            return range(0)
        return range(self._entries[0].held.version, self._entries[-1].held.version + 1)

    @property
    def total_bytes(self) -> int:
        return self._total_bytes

    def keep(self, update: Update, data: Bytes, staged: Collection[int]) -> None:
        """Write down a commit, and let the oldest go where that is more than may be kept. `staged` are the versions of
        the snapshots there are. Without room on the disk fewer are kept; a log is not worth a failed round."""
        if self._entries and update.version != self._entries[-1].held.version + 1:
            self._drop(len(self._entries))
        head = msgspec.json.encode(head_of(update, data))
        size = len(head) + data.size
        while self._entries and self._total_bytes + size > self._limit(self._entries[0], staged):
            self._drop(1)
        if size > (self._pin_bytes if update.version - 1 in staged else self._keep_bytes):
            return
        held = HeldUpdate(update.version, next(self._generation), data.size)
        while not self._write(held, head, data):
            if not self._entries:
                self._warn(size)
                return
            self._drop(1)
        self._entries.append(_Entry(held, size))
        self._total_bytes += size

    def _limit(self, oldest: _Entry, staged: Collection[int]) -> int:
        return self._pin_bytes if oldest.held.version - 1 in staged else self._keep_bytes

    def _write(self, held: HeldUpdate, head: bytes, data: Bytes) -> bool:
        """False if there is no room. Raises OSError for anything else."""
        try:
            for name, content in ((held.data, data.data), (held.head, head)):
                path = self._folder / name
                draft = path.with_name(f".draft-{path.name}")
                try:
                    draft.write_bytes(content)
                    draft.rename(path)
                except OSError:
                    draft.unlink(missing_ok=True)
                    raise
        except OSError as error:
            (self._folder / held.data).unlink(missing_ok=True)
            if error.errno not in _NO_ROOM:
                raise
            return False
        return True

    def _drop(self, count: int) -> None:
        for _ in range(count):
            entry = self._entries.popleft()
            self._total_bytes -= entry.file_bytes
            (self._folder / entry.held.head).unlink(missing_ok=True)  # first: a head promises bytes
            (self._folder / entry.held.data).unlink(missing_ok=True)

    def _warn(self, size: int) -> None:
        if not self._full:
            _log.warning(
                "no room in %s for an update of %d bytes: peers that missed commits take snapshots instead",
                self._folder,
                size,
            )
            self._full = True
