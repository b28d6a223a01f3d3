"""This machine: versions, compiler, memory, folders, limits. Tests give the facts as arguments."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from atoll import __version__
from atoll.dashboard.words import bytes_text
from atoll.network.checks.finding import Finding, found, problem, warning

PACKAGES = ("torch", "numpy", "aiohttp", "msgspec", "cryptography")
COMPILERS = ("g++", "clang++", "c++")
LEAST_FILES, ENOUGH_FILES = 256, 1024
LEAST_ROOM, SMALL_ROOM = 64 << 20, 1 << 30
"""Below the first a folder is full; below the second only a small model's state has room."""
LEAST_PART = 0.02
_ANSWER_S = 5.0


def versions() -> Finding:
    """Of Atoll, Python, and what it stands on."""
    from atoll import kernels

    held: dict[str, str] = {"atoll": __version__, "python": platform.python_version()}
    missing = []
    for package in PACKAGES:
        try:
            held[package] = version(package)
        except PackageNotFoundError:
            missing.append(package)
    target = kernels.kernel_target()
    details = {**held, "system": platform.platform(), "kernels": target}
    if missing:
        names = ", ".join(missing)
        return problem("versions", f"{names} missing", f"pip install {' '.join(missing)}", details=details)
    says = f"Atoll {__version__} ({target} kernels), Python {held['python']}, torch {held['torch']}"
    return found("versions", f"{says}, {platform.system()} {platform.release()}", details=details)


def compiler(wanted: bool, which: Callable[[str], str | None] = shutil.which) -> Finding:
    """What torch.compile needs; `wanted` if local.compile is on."""
    path = next((path for name in COMPILERS if (path := which(name))), None)
    if path is not None:
        return found("compiler", _first_line([path, "--version"]) or path, details={"path": path})
    if wanted:
        return problem(
            "compiler",
            "no C++ compiler, and local.compile needs one",
            "apt-get install g++, or set local.compile=false",
        )
    return found("compiler", "none; needed only for local.compile")


def _first_line(command: list[str]) -> str:
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.splitlines()[0].strip() if said.strip() else ""


def memory(free_bytes: int, total_bytes: int, needed_bytes: int | None = None) -> Finding:
    """RAM that is free for this process; `needed_bytes` is what the run takes, None if that is not known."""
    says = f"{bytes_text(free_bytes)} free of {bytes_text(total_bytes)}"
    details = {"total": total_bytes, "free": free_bytes, "needed": needed_bytes}
    if needed_bytes is not None and needed_bytes > free_bytes:
        return problem(
            "memory",
            f"{says}; this run takes {bytes_text(needed_bytes)}",
            "end what else runs here, or take a machine with more (atoll plan lists what takes it)",
            details=details,
        )
    if needed_bytes is not None:
        return found("memory", f"{says}; this run takes {bytes_text(needed_bytes)}", details=details)
    if free_bytes < SMALL_ROOM:
        return warning(
            "memory", says, "end what else runs here: training begins at about 1 GB", details=details
        )
    return found("memory", says, details=details)


def room(
    name: str, folder: Path, remedy: str, needed_bytes: int | None = None, *, staging: bool = False
) -> Finding:
    """Whether a folder (or the nearest one above it that is there) can be written and has room. `needed_bytes` as in
    `memory`. `staging` must be there itself, and may be small by design."""
    place = folder
    while not staging and not place.exists() and place != place.parent:
        place = place.parent
    details: dict[str, object] = {"folder": str(folder), "needed": needed_bytes}
    if not place.is_dir():
        return problem(name, f"{folder} is no folder", remedy, details=details)
    if not os.access(place, os.W_OK | os.X_OK):
        return problem(name, f"{place} cannot be written by this user", remedy, details=details)
    held = shutil.disk_usage(place)
    details |= {"total": held.total, "free": held.free}
    says = f"{bytes_text(held.free)} free of {bytes_text(held.total)} in {place}"
    if held.free < min(LEAST_ROOM, held.total) or (staging and held.free < LEAST_PART * held.total):
        return problem(name, f"{says}: it is full", remedy, details=details)
    if needed_bytes is not None:
        says += f"; this run stages {bytes_text(needed_bytes)}"
        if needed_bytes > held.free:
            return warning(name, f"{says}, and so in a slower place", remedy, details=details)
        return found(name, says, details=details)
    if held.free < SMALL_ROOM:
        return warning(name, f"{says}: room for a small model only", remedy, details=details)
    return found(name, says, details=details)


def open_files(limits: tuple[int, int] | None = None) -> Finding:
    """How many files and sockets this process may have: (now, at most)."""
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    details = {"soft": soft, "hard": hard}
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= ENOUGH_FILES:
        return found("open files", "no limit" if soft == unlimited else f"at most {soft}", details=details)
    remedy = f"ulimit -n {4096 if hard == unlimited else min(4096, hard)}"
    if hard != unlimited and hard < ENOUGH_FILES:
        remedy += f", and more by nofile in /etc/security/limits.conf (at most {hard} now)"
    judge = problem if soft < LEAST_FILES else warning
    says = f"at most {soft}: each other member takes up to 16, and torch some"
    return judge("open files", says, remedy, details=details)
