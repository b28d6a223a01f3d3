"""Shared states in tests: digests, copies, comparisons to the bit; and damage to the files that hold them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from atoll.state import manifest as manifests
from atoll.state.snapshot import LoadedState, SharedState


def digest_of(state: SharedState) -> str:
    return manifests.digest_of(
        tuple(manifests.rows_of(state.anchor)), tuple(manifests.rows_of(state.velocity))
    )


def copy_of(state: SharedState) -> LoadedState:
    return LoadedState(state.anchor.copy(), state.velocity.copy(), state.version, state.round, state.step)


def assert_same(state: SharedState, other: SharedState) -> None:
    """To the bit, and at the same place of the run."""
    for ours, theirs in ((state.anchor, other.anchor), (state.velocity, other.velocity)):
        assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))
    assert (state.version, state.round, state.step) == (other.version, other.round, other.step)


def flip_byte(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))
