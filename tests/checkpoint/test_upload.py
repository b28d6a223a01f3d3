"""What is saved goes on to the run's remote place, and a peer that has nothing begins from there."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file

from atoll.checkpoint.begin import give_up
from atoll.checkpoint.folder import OWN_FILE, CheckpointFolder, decode_own
from atoll.checkpoint.resume import fetch_latest, newest
from atoll.checkpoint.trees import put_together
from atoll.errors import ConfigError
from atoll.events import CheckpointDamaged, CheckpointFailed, CheckpointFetched, CheckpointUploaded, Event
from atoll.state.snapshot import read_snapshot
from support.saving import NUMEL, bench

pytest.importorskip("obstore", reason='needs: pip install "atoll-train[cloud]"')


def test_the_named_peer_brings_the_shared_part_and_each_its_own(tmp_path: Path) -> None:
    remote = f"file://{tmp_path / 'store'}"
    for peer, uploads in (("b", False), ("a", True)):
        with bench(tmp_path / peer, peer=peer, remote=remote) as saving:
            saving.save(4, uploads=uploads)
            saving.saver.wait(60)
            (uploaded,) = saving.of(CheckpointUploaded)
            assert (uploaded.version, uploaded.shared, uploaded.address) == (4, uploads, remote)
        assert (tmp_path / "store" / "latest").exists() == uploads
    there = CheckpointFolder(tmp_path / "store")
    assert read_snapshot(there.shared(4)).anchor.tobytes() == saving.state.anchor.tobytes()
    assert {peer: there.own_versions(peer) for peer in there.peers()} == {"a": [4], "b": [4]}


def test_a_store_that_cannot_be_written_costs_an_event_and_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file, where a folder should be")
    with bench(tmp_path / "a", remote=f"file://{tmp_path / 'store'}") as saving:
        saving.save(1, uploads=True)
        saving.saver.wait(60)
        (failed,) = saving.of(CheckpointFailed)
        assert "it is saved here, but not in file://" in failed.reason
        assert CheckpointFolder(saving.place).all_versions() == [1]


def test_who_has_nothing_takes_the_latest_from_the_remote_place(tmp_path: Path) -> None:
    remote = f"file://{tmp_path / 'store'}"
    events: list[Event] = []
    assert not fetch_latest(remote, tmp_path / "new", "a", events.append), "a new run"
    with bench(tmp_path / "a", remote=remote) as saving:
        for version in (1, 2):
            saving.save(version, uploads=True)
            saving.saver.wait(60)
    shutil.rmtree(saving.place)
    assert fetch_latest(remote, tmp_path / "new", "a", events.append)
    found = newest(tmp_path / "new", run="run", peer="a", numel=NUMEL, emit=events.append)
    assert found is not None
    assert found.state.version == 2
    assert np.array_equal(found.state.anchor, saving.state.anchor)
    assert found.own is not None
    manifest, path = found.own
    assert (manifest.version, found.remarks) == (2, ())
    assert put_together(manifest.state["inner"], load_file(path))["moments"].tolist() == [2.0] * 7
    told = [each for each in events if isinstance(each, CheckpointFetched)]
    assert [(each.version, each.own_version) for each in told] == [(2, 2)]


def two_versions(tmp_path: Path, remote: str) -> None:
    """The remote place has versions 1 and 2 with own parts of a; nothing of it is here any more."""
    with bench(tmp_path / "a", remote=remote) as saving:
        for version in (1, 2):
            saving.save(version, uploads=True)
            saving.saver.wait(60)
    shutil.rmtree(saving.place)


@pytest.mark.parametrize("case", ["damaged", "missing", "rolled back"])
def test_an_older_own_part_is_fetched_where_that_of_the_latest_is_no_use(tmp_path: Path, case: str) -> None:
    remote = f"file://{tmp_path / 'store'}"
    two_versions(tmp_path, remote)
    own = CheckpointFolder(tmp_path / "store").own("a", 2)
    if case == "damaged":
        data = bytearray((own / OWN_FILE).read_bytes())
        data[-1] ^= 1
        (own / OWN_FILE).write_bytes(data)
    elif case == "missing":
        shutil.rmtree(own)
    else:
        said = decode_own((own / "manifest.json").read_bytes(), "a", 2)
        other = msgspec.structs.replace(said, digest="0" * 64).sealed()
        (own / "manifest.json").write_bytes(msgspec.json.encode(other))
    events: list[Event] = []
    assert fetch_latest(remote, tmp_path / "new", "a", events.append)
    (told,) = [each for each in events if isinstance(each, CheckpointFetched)]
    assert (told.version, told.own_version) == (2, 1)
    damaged = [each.version for each in events if isinstance(each, CheckpointDamaged)]
    assert damaged == ([2] if case == "damaged" else [])
    found = newest(tmp_path / "new", run="run", peer="a", numel=NUMEL, emit=events.append)
    assert found is not None
    assert found.own is not None
    assert (found.state.version, found.own[0].version) == (2, 1)
    assert "of version 1" in found.remarks[0]
    assert not list((tmp_path / "new").rglob("*.partial"))


def test_who_never_saved_has_no_own_part_to_fetch(tmp_path: Path) -> None:
    remote = f"file://{tmp_path / 'store'}"
    two_versions(tmp_path, remote)
    events: list[Event] = []
    assert fetch_latest(remote, tmp_path / "new", "z", events.append)
    (told,) = [each for each in events if isinstance(each, CheckpointFetched)]
    assert told.own_version is None
    assert CheckpointFolder(tmp_path / "new").peers() == []


def test_beginning_anew_gives_up_the_remote_place_only_if_forced(tmp_path: Path) -> None:
    remote = f"file://{tmp_path / 'store'}"
    with bench(tmp_path / "a", remote=remote) as saving:
        saving.save(1, uploads=True)
        saving.saver.wait(60)
    with pytest.raises(ConfigError, match=r"store has checkpoints, the newest of version 1; add --force"):
        give_up(tmp_path / "new", force=False, remote=remote)
    give_up(tmp_path / "new", force=True, remote=remote)
    assert not fetch_latest(remote, tmp_path / "new", "a", lambda event: None)
