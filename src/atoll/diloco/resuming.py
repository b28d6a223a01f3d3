"""What a peer goes on from, as rank 0 found it and all of its ranks take it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from atoll.diloco.outer import OuterState
from atoll.kernels import Floats
from atoll.state.manifest import Vector
from atoll.state.snapshot import read_elements, read_manifest


def is_of(name: str, prefix: str) -> bool:
    """Whether a saved tensor is that of the rank with this prefix; rank 0's have none."""
    return name.startswith(prefix) if prefix else re.match(r"rank\d+/", name) is None


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 found to go on from; no `folder`: nothing. `own` is the file of this peer's own part, if it has
    one."""

    folder: str = ""
    version: int = -1
    round: int = 0
    step: int = 0
    term: int = 0
    own: str = ""
    own_state: dict[str, Any] = {}
    remarks: tuple[str, ...] = ()


def read_ranges(folder: Path, state: OuterState) -> bool:
    """This rank's ranges of a snapshot, of which rank 0 has checked every byte. Raises LocalError."""
    manifest = read_manifest(folder)
    vectors: tuple[tuple[Vector, Floats], ...] = (("anchor", state.anchor), ("velocity", state.velocity))
    for vector, values in vectors:
        at = 0
        for each in state.ranges:
            read_elements(folder, manifest, vector, each.start, values[at : at + each.stop - each.start])
            at += each.stop - each.start
    return True
