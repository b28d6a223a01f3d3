"""What a peer goes on from: the newest whole checkpoint; what is not whole is named, and the one before it is used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.checkpoint.begin import give_up
from atoll.checkpoint.folder import CheckpointFolder
from atoll.checkpoint.resume import Resumption, newest
from atoll.errors import ConfigError, LocalError
from atoll.events import CheckpointDamaged, Event
from support.saving import NUMEL, bench


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with bench(folder) as peer:
        for version in (1, 2, 3):
            peer.save(version)
    return folder / "place"


@pytest.fixture
def place(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "place"))


def find(place: Path, peer: str = "a", numel: int = NUMEL) -> tuple[Resumption | None, list[Event]]:
    events: list[Event] = []
    return newest(place, run="run", peer=peer, numel=numel, emit=events.append), events


def flip(path: Path, at: int = -5) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a flipped byte in the values": lambda folder: flip(folder / "shard-00000.safetensors"),
    "a flipped byte in the manifest": lambda folder: flip(folder / "manifest.json", 300),
    "half a shard": lambda folder: cut(folder / "shard-00000.safetensors"),
    "half a manifest": lambda folder: cut(folder / "manifest.json"),
    "no shard": lambda folder: (folder / "shard-00000.safetensors").unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
}


def test_the_newest_is_taken_with_the_own_part(place: Path) -> None:
    found, events = find(place)
    assert found is not None
    assert (found.state.version, found.state.step, found.term, found.remarks) == (3, 30, 1, ())
    assert found.own is not None
    assert events == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_named_and_the_one_before_it_used(place: Path, damage: str) -> None:
    DAMAGES[damage](CheckpointFolder(place).shared(3))
    found, events = find(place)
    assert found is not None
    assert found.state.version == 2
    assert found.own is not None
    assert found.own[0].version == 2
    (told,) = events
    assert isinstance(told, CheckpointDamaged)
    assert told.version == 3
    assert "00000003" in told.reason


def test_without_the_outer_state_it_is_not_whole(place: Path) -> None:
    """Whoever takes the momentum out makes it damaged: 2.022628 instead of 2.652032 cannot happen unseen."""
    shard = CheckpointFolder(place).shared(3) / "shard-00000.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[: -4 * NUMEL] + bytes(4 * NUMEL))
    found, events = find(place)
    assert found is not None
    assert found.state.version == 2
    assert len(events) == 1


@pytest.mark.parametrize("damage", ["own.safetensors", "manifest.json"])
def test_a_damaged_own_part_is_named_and_an_older_one_used(place: Path, damage: str) -> None:
    flip(CheckpointFolder(place).own("a", 3) / damage)
    found, events = find(place)
    assert found is not None
    assert found.own is not None
    assert (found.state.version, found.own[0].version) == (3, 2)
    assert "of version 2" in found.remarks[0]
    assert [event.version for event in events if isinstance(event, CheckpointDamaged)] == [3]


def test_a_peer_without_an_own_part_is_told_so_and_hears_of_the_others(place: Path) -> None:
    found, _ = find(place, peer="new")
    assert found is not None
    assert found.own is None
    assert found.remarks == ("nothing of new's own was saved with it: its inner optimizer begins fresh",)
    assert list(found.others) == ["a"]


def test_nothing_there_is_no_error(tmp_path: Path) -> None:
    assert find(tmp_path / "absent") == (None, [])


def test_another_model_or_run_is_refused(place: Path) -> None:
    with pytest.raises(LocalError, match="has 3000 parameters and the model 7"):
        find(place, numel=7)
    with pytest.raises(LocalError, match="belongs to run 'run' and not to 'other'"):
        newest(place, run="other", peer="a", numel=NUMEL, emit=lambda event: None)


def test_beginning_anew_over_checkpoints_needs_force(place: Path) -> None:
    with pytest.raises(ConfigError, match="the newest of version 3; add --force"):
        give_up(place, force=False)
    assert give_up(place, force=True) == [3, 2, 1]
    assert find(place) == (None, [])
    assert give_up(place, force=False) == []
