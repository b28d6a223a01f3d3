"""Whether this machine has room for a peer: asked before anything starts, so that nobody trains for hours and then ends
at the first sync.

Only what is counted is asked for, not what is estimated: a peer is not refused by a guess.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import psutil

from atoll.errors import LocalError
from atoll.plan.memory import Item, total_bytes
from atoll.train.sizes import PeerSizes

_CGROUPS = Path("/sys/fs/cgroup")
_GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),  # version 2
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
}
"""By controller, as /proc/self/cgroup names it: the files of limit and usage, and what of memory.stat could go."""
_RAM_FILESYSTEMS = {"tmpfs", "ramfs"}


def check_room(sizes: PeerSizes, *, staging: Path, fallback: Path, ranks_here: int = 0) -> None:
    """Raises LocalError, with the numbers, if so many of the peer's ranks (0: all) find no room in this machine's RAM,
    or no place to stage: `staging`, or `fallback` where that is too small."""
    largest, num_ranks = sizes.largest, ranks_here or sizes.num_ranks
    free_bytes = free_memory_bytes()
    held = [*largest.host, *(largest.device if sizes.on_cpu else ())]
    needed_bytes = num_ranks * total_bytes(held, estimates=False)
    staged_in = place_of(sizes.staged_bytes, staging, fallback)
    what = _bill(held)
    if num_ranks > 1:
        what += f", for each of {num_ranks} ranks"
    if is_ram(staged_in):
        needed_bytes += sizes.staged_bytes
        what += f"; {_gigabytes(sizes.staged_bytes)} staged in {staged_in}"
    if needed_bytes > free_bytes:
        raise LocalError(
            f"this peer needs {_gigabytes(needed_bytes)} of RAM, and {_gigabytes(free_bytes)} are free: {what}; "
            "take a machine with more, stage on a disk (checkpoint.staging), or see `atoll plan`"
        )


def place_of(needed_bytes: int, staging: Path, fallback: Path) -> Path:
    """Where it will be staged, as `recovery.folder` chooses. Raises LocalError if neither has the room."""
    for place in (staging, fallback):
        if free_bytes_in(place) >= needed_bytes:
            return place
    raise LocalError(
        f"staging needs {_gigabytes(needed_bytes)}; {staging} has {_gigabytes(free_bytes_in(staging))} free and "
        f"{fallback} {_gigabytes(free_bytes_in(fallback))}; make room, or name another folder by checkpoint.staging"
    )


def free_memory_bytes() -> int:
    """What this process may still take: the machine's memory, or less where it is in a control group with a limit."""
    return min([psutil.virtual_memory().available, *_left_in_groups()])


def free_bytes_in(folder: Path) -> int:
    """On the file system that the folder is on, or will be; 0 if there is none."""
    for path in (folder.absolute(), *folder.absolute().parents):
        with contextlib.suppress(OSError):
            found = os.statvfs(path)
            return found.f_bavail * found.f_frsize
    return 0


def is_ram(folder: Path) -> bool:
    """Whether what is written there takes memory."""
    mounts = [
        (Path(each.mountpoint), each.fstype)
        for each in psutil.disk_partitions(all=True)
        if folder.absolute().is_relative_to(each.mountpoint)
    ]
    _, kind = max(mounts, key=lambda each: len(each[0].parts), default=(folder, ""))
    return kind in _RAM_FILESYSTEMS


def _left_in_groups(own: Path = Path("/proc/self/cgroup"), root: Path = _CGROUPS) -> Iterable[int]:
    """What the limits of this process's control groups leave, from its own group to the outermost. Pages of files that
    could be dropped are not counted as taken."""
    lines = own.read_text().splitlines() if own.exists() else []
    for _, controllers, name in (line.split(":", 2) for line in lines):
        if controllers not in _GROUP_FILES:
            continue
        limit, taken, droppable = _GROUP_FILES[controllers]
        top = root / controllers
        inner = top / name.strip("/")
        for group in (inner, *inner.parents):
            if not group.is_relative_to(top):
                break
            with contextlib.suppress(
                OSError, ValueError, KeyError
            ):  # the outermost has no limit, or says "max"
                left = int((group / limit).read_text()) - int((group / taken).read_text())
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                yield max(0, left + int(stat[droppable]))


def _bill(items: Iterable[Item]) -> str:
    return ", ".join(
        f"{_gigabytes(item.num_bytes)} {item.name}" for item in items if not item.estimate and item.num_bytes
    )


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
