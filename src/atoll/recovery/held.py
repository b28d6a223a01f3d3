"""What a donor holds, as its sidecar tells it; and how the files in a staging folder are named.

A name carries a generation, a number that is used once in a folder's life. Slots are written again and a history can
be rolled back, so a version alone does not name bytes for ever; version and generation do.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import msgspec

SNAPSHOTS: Final = "snapshots"
UPDATES: Final = "updates"
INNER_DATA: Final = "inner.safetensors"
INNER_HEAD: Final = "inner.json"

_SNAPSHOT = re.compile(r"(\d{1,15})-(\d{1,15})")
_UPDATE_HEAD = re.compile(r"(\d{1,15})-(\d{1,15})\.json")


class HeldSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """`inner_bytes` has the donor's inner optimizer state that was staged with it; 0: none was."""

    version: int
    generation: int
    inner_bytes: int = 0

    @property
    def folder(self) -> str:
        return f"{SNAPSHOTS}/{self.version}-{self.generation}"


class HeldUpdate(msgspec.Struct, frozen=True, array_like=True):
    """`size_bytes` are the finished bytes."""

    version: int
    generation: int
    size_bytes: int

    @property
    def head(self) -> str:
        return f"{UPDATES}/{self.version}-{self.generation}.json"

    @property
    def data(self) -> str:
        return f"{UPDATES}/{self.version}-{self.generation}.bin"


class Held(msgspec.Struct, frozen=True):
    """Staged snapshots and kept updates, by version."""

    snapshots: tuple[HeldSnapshot, ...] = ()
    updates: tuple[HeldUpdate, ...] = ()


class Stock:
    """The same, found by version; of two with one version, the later one."""

    def __init__(self, held: Held) -> None:
        self.snapshots = {each.version: each for each in held.snapshots}
        self.updates = {each.version: each for each in held.updates}

    @property
    def newest_update(self) -> HeldUpdate | None:
        return self.updates[max(self.updates)] if self.updates else None


def look_up(folder: Path, after: int) -> Held:
    """What a staging folder holds: all snapshots, and the updates that made versions above `after`.

    Something that appears or goes meanwhile is in or not in; a name that is told has been whole.
    """
    snapshots = [
        HeldSnapshot(int(found[1]), int(found[2]), _inner_bytes(folder / SNAPSHOTS / name))
        for name in _names(folder / SNAPSHOTS)
        if (found := _SNAPSHOT.fullmatch(name))
    ]
    updates = []
    for name in _names(folder / UPDATES):
        found = _UPDATE_HEAD.fullmatch(name)
        if found and int(found[1]) > after:
            try:
                size_bytes = (folder / UPDATES / name).with_suffix(".bin").stat().st_size
            except FileNotFoundError:
                continue  # just removed
            updates.append(HeldUpdate(int(found[1]), int(found[2]), size_bytes))
    return Held(tuple(sorted(snapshots, key=_order)), tuple(sorted(updates, key=_order)))


def _inner_bytes(snapshot: Path) -> int:
    try:
        return (snapshot / INNER_DATA).stat().st_size if (snapshot / INNER_HEAD).exists() else 0
    except FileNotFoundError:
        return 0


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _order(each: HeldSnapshot | HeldUpdate) -> tuple[int, int]:
    return each.version, each.generation
