"""Snapshots on disk: all of it comes back, to the bit, or it is refused with the file's name and what to do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from atoll import kernels
from atoll.errors import LocalError
from atoll.state import manifest as manifests
from atoll.state.manifest import Manifest
from atoll.state.snapshot import (
    LoadedState,
    read_manifest,
    read_snapshot,
    shard_header,
    write_snapshot,
)
from support.states import assert_same, flip_byte

FIXTURE = Path(__file__).parents[1] / "support" / "snapshots" / "format-1"


def state_of(numel: int, seed: int = 0) -> LoadedState:
    rng = np.random.default_rng(seed)
    anchor, velocity = (rng.standard_normal(numel, dtype=np.float32) for _ in range(2))
    return LoadedState(anchor, velocity, version=3, round=4, step=40)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Three shards."""
    write_snapshot(tmp_path / "snapshot", state_of(1000), "run", shard_elements=400)
    return tmp_path / "snapshot"


def test_a_snapshot_of_format_1_loads_for_ever() -> None:
    state = read_snapshot(FIXTURE)
    assert state.anchor.tolist() == [0.5, -1.25, 3.0, 0.0, 2**-66, 7.0, -0.0]
    assert state.velocity.tolist() == [1.0, 2.0, -3.0, 4.0, 5.0, -6.0, 7.0]
    assert (state.version, state.round, state.step) == (12, 15, 1500)
    assert read_manifest(FIXTURE).run == "fixture"


@settings(max_examples=40, deadline=None)
@given(numel=st.integers(1, 3000), shard_elements=st.integers(1, 3000), seed=st.integers(0, 2**32 - 1))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, numel: int, shard_elements: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("round") / "snapshot"
    shard_elements = max(shard_elements, numel // 20 + 1)
    state = state_of(numel, seed)
    manifest = write_snapshot(folder, state, "run", shard_elements)
    assert read_manifest(folder) == manifest
    assert manifest.digest == kernels.state_digest(
        [kernels.digest_pieces(state.anchor), kernels.digest_pieces(state.velocity)]
    )
    assert_same(read_snapshot(folder), state)


@pytest.mark.parametrize("numel", [kernels.PIECE - 1, kernels.PIECE, kernels.PIECE + 1])
def test_sizes_around_a_piece_are_read_back(tmp_path: Path, numel: int) -> None:
    state = state_of(numel)
    manifest = write_snapshot(tmp_path / "snapshot", state, "run", shard_elements=700_000)
    assert len(manifest.anchor) == -(-numel // kernels.PIECE)
    assert_same(read_snapshot(tmp_path / "snapshot"), state)


def test_other_tools_open_the_shards(written: Path) -> None:
    state = state_of(1000)
    for shard in read_manifest(written).shards:
        with safe_open(written / shard.file, framework="numpy") as file:
            assert set(file.keys()) == {"anchor", "velocity"}
            assert np.array_equal(file.get_tensor("anchor"), state.anchor[shard.start : shard.stop])
            assert np.array_equal(file.get_tensor("velocity"), state.velocity[shard.start : shard.stop])
            assert file.metadata()["start"] == str(shard.start)


def test_values_begin_on_a_page() -> None:
    for stop in (1, 10**5, 10**12):
        assert len(shard_header(0, stop)) % 4096 == 0


def test_spans_name_the_bytes_of_any_elements(written: Path) -> None:
    state, manifest = state_of(1000), read_manifest(written)
    for start, stop in ((0, 1000), (399, 401), (5, 6), (800, 1000)):
        data = b""
        for span in manifest.spans("velocity", start, stop):
            data += (written / span.file).read_bytes()[span.offset : span.offset + span.size_bytes]
        assert np.array_equal(np.frombuffer(data, dtype="<f4"), state.velocity[start:stop])


def test_nothing_is_left_of_a_snapshot_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(data: Manifest) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifests, "encode", no_space)
    with pytest.raises(
        LocalError, match=r"cannot write snapshot .*/snapshot: no space left on device; free some"
    ):
        write_snapshot(tmp_path / "snapshot", state_of(10), "run")
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_is_never_written_over_another(written: Path) -> None:
    before = read_manifest(written)
    with pytest.raises(LocalError, match="exists already; remove it or choose another name"):
        write_snapshot(written, state_of(5), "run")
    assert read_manifest(written) == before


def test_a_stale_draft_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / ".draft-snapshot").mkdir()
    (tmp_path / ".draft-snapshot" / "shard-00000.safetensors").write_bytes(b"half")
    write_snapshot(tmp_path / "snapshot", state_of(10), "run")
    assert_same(read_snapshot(tmp_path / "snapshot"), state_of(10))


# ---- damage ------------------------------------------------------------------------------------------------


def changed(folder: Path, **fields: object) -> None:
    """Write the manifest anew, with other values."""
    entries = msgspec.json.decode((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_bytes(msgspec.json.encode({**entries, **fields}))


def without_hashes(folder: Path) -> None:
    manifest = read_manifest(folder)
    shards = tuple(msgspec.structs.replace(shard, sha256="") for shard in manifest.shards)
    bare = manifests.sealed(msgspec.structs.replace(manifest, shards=shards))
    (folder / "manifest.json").write_bytes(manifests.encode(bare))


def flipped_where_only_the_table_looks(folder: Path) -> None:
    without_hashes(folder)
    flip_byte(folder / "shard-00001.safetensors", 4096 + 17)


def without_a_row(folder: Path) -> None:
    changed(folder, anchor=[])


def another_row(folder: Path) -> None:
    changed(folder, anchor=["0" * 32])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped byte": (
        lambda folder: flip_byte(folder / "shard-00001.safetensors", 5000),
        "shard-00001.safetensors is damaged or unfinished: its SHA-256",
    ),
    "a flipped byte without hashes": (
        flipped_where_only_the_table_looks,
        "snapshot is damaged or unfinished: elements 0 to 1000 of the anchor",
    ),
    "a short shard": (
        lambda folder: (folder / "shard-00002.safetensors").write_bytes(b"x" * 100),
        "shard-00002.safetensors is damaged or unfinished: it has 100 bytes and should have",
    ),
    "no shard": (
        lambda folder: (folder / "shard-00000.safetensors").unlink(),
        "shard-00000.safetensors is damaged or unfinished: it cannot be read: no such file",
    ),
    "no manifest": (
        lambda folder: (folder / "manifest.json").unlink(),
        "manifest.json is damaged or unfinished: it cannot be read: no such file",
    ),
    "half a manifest": (
        lambda folder: (folder / "manifest.json").write_bytes(b'{"format": 1, "run"'),
        "manifest.json is damaged or unfinished: it is no manifest",
    ),
    "another format": (
        lambda folder: changed(folder, format=2),
        "manifest.json .*: it has format 2, this version reads 1",
    ),
    "another digest": (
        lambda folder: changed(folder, digest="0" * 64),
        "manifest.json .*: its digest is not that of its tables",
    ),
    "another step": (
        lambda folder: changed(folder, step=41),
        "manifest.json .*: its check is not that of what it says",
    ),
    "no rows": (without_a_row, "manifest.json .*: the digest table of the anchor does not have 1 rows"),
    "another row": (another_row, "manifest.json .*: its digest is not that of its tables"),
    "more elements": (
        lambda folder: changed(folder, numel=1001),
        "manifest.json .*: its shards end at element 1000 of 1001",
    ),
    "absurdly many elements": (
        lambda folder: changed(folder, numel=10**15),
        "manifest.json .*: the digest table of the anchor",
    ),
    "a name that leads out": (
        lambda folder: changed(
            folder,
            shards=[
                {
                    "file": "../x",
                    "start": 0,
                    "stop": 1000,
                    "size_bytes": 9000,
                    "anchor_at": 8,
                    "velocity_at": 4008,
                }
            ],
        ),
        r"manifest.json .*: '\.\./x' is no name for a shard",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_with_the_file_and_what_to_do(written: Path, damage: str) -> None:
    harm, sentence = DAMAGE[damage]
    harm(written)
    with pytest.raises(
        LocalError, match=f"snapshot file .*{sentence}.*; use another snapshot, or copy it again"
    ):
        read_snapshot(written)


def test_a_header_that_contradicts_the_manifest_is_damage(written: Path) -> None:
    without_hashes(written)
    path = written / "shard-00000.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"F32"', b'"I32"', 1))
    with pytest.raises(LocalError, match="its header and the manifest differ about the anchor"):
        read_snapshot(written)
    path.write_bytes(b"\xff" * 8 + data[8:])
    with pytest.raises(LocalError, match="its header has no length"):
        read_snapshot(written)


def test_every_single_flipped_byte_of_the_fixture_is_found_or_harmless(tmp_path: Path) -> None:
    """Harmless: padding. Whatever loads is what was written."""
    original = read_snapshot(FIXTURE)
    size = (FIXTURE / "shard-00000.safetensors").stat().st_size
    for name, positions in (
        ("shard-00000.safetensors", [*range(0, 300, 7), *range(4096, size)]),
        ("manifest.json", range(0, (FIXTURE / "manifest.json").stat().st_size, 11)),
    ):
        for at in positions:
            folder = tmp_path / f"{name}-{at}"
            shutil.copytree(FIXTURE, folder)
            flip_byte(folder / name, at)
            try:
                read = read_snapshot(folder)
            except LocalError:
                continue
            assert_same(read, original)
