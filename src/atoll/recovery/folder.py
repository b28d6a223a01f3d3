"""The staging folder: a place in RAM, only for this user, that is gone when its process is.

Its name is fresh each time; a lock file says that its owner lives. Whoever makes a folder removes those of owners that
are dead. The kernel drops a lock with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Final

from atoll import log
from atoll.errors import LocalError

RAM: Final = Path("/dev/shm")
PREFIX: Final = "atoll-"
LOCK: Final = "lock"
YIELD: Final = "yield"
"""One byte: 1 while a round moves bytes, so that the sidecar keeps to its floor rate."""

_log = log.get(__name__)


class StagingFolder:
    """A folder that this process holds the lock of."""

    def __init__(self, path: Path) -> None:
        """Takes over the new, empty folder `path`. The lock is there, and held, before it has its name."""
        self.path = path
        draft = path / f"{LOCK}.new"
        self._lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.rename(path / LOCK)
        self._yield = os.open(path / YIELD, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self.yield_to_round(False)

    def yield_to_round(self, moving: bool) -> None:
        os.pwrite(self._yield, b"\1" if moving else b"\0", 0)

    def remove(self) -> None:
        """Give it back to the system. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        for fd in (self._lock, self._yield):
            if fd >= 0:
                os.close(fd)
        self._lock = self._yield = -1


def make_folder(
    run: str, peer: str, needed_bytes: int, fallback: Path, ram: Path = RAM, *, filled: str = ""
) -> StagingFolder:
    """A new staging folder where `needed_bytes` have room: in RAM, else under `fallback`, with a warning. `filled` says
    what found no room in RAM after all, however much there seems to be.

    Raises LocalError if it can be made nowhere.
    """
    free_bytes = _free_bytes(ram)
    if free_bytes >= needed_bytes and not filled:
        with contextlib.suppress(OSError):  # not for us to write: as good as not there
            return _make(ram, run, peer)
    try:
        fallback.mkdir(parents=True, exist_ok=True)
        made = _make(fallback, run, peer)
    except OSError as error:
        raise LocalError(
            f"no place to stage snapshots: {ram} has {free_bytes} bytes free of the {needed_bytes} needed, and "
            f"{fallback} cannot be used ({(error.strerror or str(error)).lower()}); make room in one of them"
        ) from error
    _log.warning(
        "%s%s has %d bytes free and staging needs %d: staging in %s, which may be slower",
        f"{filled}: " if filled else "",
        ram,
        free_bytes,
        needed_bytes,
        fallback,
    )
    return made


def remove_stale(root: Path) -> int:
    """Remove this user's staging folders under `root` whose owners are dead; how many."""
    removed = 0
    for path in root.glob(f"{PREFIX}*"):
        try:
            if path.is_symlink() or path.stat().st_uid != os.geteuid():
                continue
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # not a staging folder, or one that is being made or removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its owner lives
        else:
            shutil.rmtree(path, ignore_errors=True)
            removed += 1
        finally:
            os.close(lock)
    return removed


def _make(root: Path, run: str, peer: str) -> StagingFolder:
    remove_stale(root)
    path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{_plain(run)}-{_plain(peer)}-", dir=root))  # mode 0700
    try:
        return StagingFolder(path)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        raise


def _plain(name: str) -> str:
    """A name of a run or peer, fit for a file name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:40]


def _free_bytes(root: Path) -> int:
    try:
        found = os.statvfs(root)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
