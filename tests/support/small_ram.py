"""A RAM-backed folder of a few megabytes, which others fill while a peer stages in it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def tmpfs(folder: Path, size_mb: int) -> Iterator[Path]:
    """Mounted here, and unmounted in any case. Skips, saying why, where that is not allowed."""
    if os.geteuid():
        pytest.skip("mounting a tmpfs needs root")
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size_mb}m,mode=700", "tmpfs", str(folder)]
    done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> int:
    """Take all that is left of it; how many bytes."""
    taken = 0
    with (folder / "ballast").open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while True:
                    taken += file.write(bytes(size))
            except OSError:
                continue
    return taken
