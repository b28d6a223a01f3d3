"""Snapshots that lie: each is refused with a sentence, nothing outside the folder is touched, nothing big allocated."""

from __future__ import annotations

import contextlib
import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.checkpoint.folder import CheckpointFolder
from atoll.errors import LocalError
from atoll.state import manifest as manifests
from atoll.state.manifest import Manifest
from atoll.state.snapshot import LoadedState, read_manifest, read_snapshot, write_snapshot
from atoll.state.verify import verify_snapshot

SHARD = "shard-00000.safetensors"


class Payload:
    """Unpickled, it makes a file."""

    def __reduce__(self) -> object:
        return os.mkdir, ("unpickled",)


def forge(folder: Path, **changes: object) -> None:
    """A manifest that is consistent with itself, as far as a forger can make it."""
    manifest = manifests.sealed(msgspec.structs.replace(read_manifest(folder), **changes))
    (folder / "manifest.json").write_bytes(manifests.encode(manifest))


def shard(folder: Path, **changes: object) -> None:
    (only,) = read_manifest(folder).shards
    forge(folder, shards=(msgspec.structs.replace(only, **changes),))


def pickled(folder: Path) -> None:
    (folder / SHARD).write_bytes(pickle.dumps(Payload()))
    shard(folder, sha256="")


def pickled_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(pickle.dumps(Payload()))


def long_header(folder: Path) -> None:
    with (folder / SHARD).open("r+b") as file:
        file.write((2**62).to_bytes(8, "little"))
    shard(folder, sha256="")


def linked(folder: Path) -> None:
    (folder / SHARD).rename(folder.parent / "outside")
    (folder / SHARD).symlink_to(folder.parent / "outside")


def linked_manifest(folder: Path) -> None:
    (folder / "manifest.json").rename(folder.parent / "outside")
    (folder / "manifest.json").symlink_to(folder.parent / "outside")


def pipe(folder: Path) -> None:
    (folder / SHARD).unlink()
    os.mkfifo(folder / SHARD)


def huge_json(folder: Path) -> None:
    with (folder / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk


def deep_json(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"[" * 1_000_000)


ATTACKS: list[tuple[Callable[[Path], None], str]] = [
    (lambda folder: shard(folder, file="../outside"), "no name for a shard"),
    (lambda folder: shard(folder, file="/etc/passwd"), "no name for a shard"),
    (lambda folder: shard(folder, file="manifest.json"), "no name for a shard"),
    (lambda folder: forge(folder, numel=2**62), "rows"),
    (lambda folder: shard(folder, stop=2**62), "too few for its elements"),
    (lambda folder: shard(folder, size_bytes=2**62), "should have"),
    (lambda folder: shard(folder, anchor_at=2**62), "too few for its elements"),
    (pickled, "should have"),
    (pickled_manifest, "no manifest"),
    (long_header, "header has no length"),
    (linked, "it is a link"),
    (linked_manifest, "it is a link"),
    (pipe, "no plain file"),
    (huge_json, "more than"),
    (deep_json, "no manifest|recursion"),
]


@pytest.mark.parametrize(("attack", "sentence"), ATTACKS)
@pytest.mark.parametrize("read", [read_snapshot, verify_snapshot])
def test_a_snapshot_that_lies_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attack: Callable[[Path], None],
    sentence: str,
    read: Callable[[Path], object],
) -> None:
    monkeypatch.chdir(tmp_path)
    values = np.ones(100, np.float32)
    folder = tmp_path / "snapshot"
    write_snapshot(folder, LoadedState(values, values, 1, 1, 1), "run")
    attack(folder)
    before = sorted(tmp_path.iterdir())
    tracemalloc.start()
    try:
        with pytest.raises(LocalError, match=sentence) as refused:
            read(folder)
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "\n" not in str(refused.value)
    assert most_bytes < 200 << 20
    assert sorted(tmp_path.iterdir()) == before


def test_what_leads_out_of_a_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    (tmp_path / "secret").write_text('{"format": 1, "version": 9, "digest": "x"}')
    (tmp_path / "place" / "latest").symlink_to(tmp_path / "secret")
    assert CheckpointFolder(tmp_path / "place").latest() is None


@settings(max_examples=60, deadline=None)
@given(
    data=st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(Manifest.__struct_fields__) | st.text(max_size=5), inner, max_size=8
            )
        ),
        max_leaves=12,
    ).map(lambda tree: repr(tree).replace("'", '"').replace("None", "null").encode())
)
def test_whatever_is_read_is_a_manifest_or_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        manifests.decode(data)
