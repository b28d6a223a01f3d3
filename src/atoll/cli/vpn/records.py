"""What `atoll vpn up` leaves for `status` and `down`: who keeps which interface, and how its network stands.

One lock and one JSON file for each interface, in `FOLDER`, gone after a restart of the machine, as interfaces are. The
lock is held for as long as the process lives, so a pid is never taken for another process's.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from atoll.errors import LocalError
from atoll.network.chosen_paths import FOLDER


@contextlib.contextmanager
def keeping(interface: str) -> Generator[None]:
    """While inside, this process keeps the interface. Raises LocalError if another one does."""
    path = _lock(interface)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as lock:
        if not any(
            _locked(lock.fileno()) or time.sleep(0.05) for _ in range(5)
        ):  # one who looks has it for a moment
            raise LocalError(
                f"another atoll vpn up (pid {_pid(path)}) keeps {interface}: end it with atoll vpn down, or choose "
                "another name with --interface"
            )
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        try:
            yield
        finally:
            _status(interface).unlink(missing_ok=True)


def keeper(interface: str) -> int:
    """The pid of the process that keeps the interface; 0 if none does."""
    path = _lock(interface)
    try:
        with path.open() as lock:
            return 0 if _locked(lock.fileno()) else _pid(path)
    except FileNotFoundError:
        return 0
    except PermissionError:
        raise LocalError(f"{path} is not for this user: sudo atoll vpn ...") from None


def end_keeper(interface: str, within_s: float) -> int:
    """Ask whoever keeps the interface to end, and wait for that. Its pid; 0 if there was none. Raises LocalError."""
    pid = keeper(interface)
    if not pid:
        return 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline_s = time.monotonic() + within_s
    while keeper(interface) == pid:
        if time.monotonic() > deadline_s:
            raise LocalError(
                f"atoll vpn up (pid {pid}) did not end in {within_s:g} s: kill -9 {pid}, then again"
            )
        time.sleep(0.05)
    return pid


def write_status(interface: str, status: dict[str, Any]) -> None:
    """Whole or not at all, for everybody to read: there is no secret in it."""
    path = _status(interface)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(status) + "\n")
    part.chmod(0o644)
    part.rename(path)


def read_status(interface: str) -> dict[str, Any] | None:
    """As the keeper wrote it last; None if there is none."""
    try:
        found = json.loads(_status(interface).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def forget(interface: str) -> None:
    """What a keeper that was killed left here."""
    _status(interface).unlink(missing_ok=True)


def _locked(descriptor: int) -> bool:
    """Take the lock, if nobody has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pid(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


def _lock(interface: str) -> Path:
    return FOLDER / f"{interface}.lock"


def _status(interface: str) -> Path:
    return FOLDER / f"{interface}.json"
