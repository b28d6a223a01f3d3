"""A joiner that wants a donor's inner state: all of it from one donor, checked, of the snapshot's version, or none."""

from __future__ import annotations

from pathlib import Path

from atoll import kernels
from atoll.recovery.donor import Donor
from atoll.recovery.targets import InnerTaken
from atoll.recovery.update import PIECE_BYTES
from support.donating import commit_to, crew
from support.history import History
from support.joining import Joiner
from support.states import assert_same, flip_byte

NUMEL = kernels.PIECE + 1000
SIZE = PIECE_BYTES + 777


def inner_of(number: int) -> bytes:
    return bytes([number + 1]) * SIZE


def stage(donors: list[Donor], history: History, *numbers: int) -> None:
    """All stage; those that are named have an inner state."""
    for number, donor in enumerate(donors):
        assert donor.stage(history.state, inner_of(number) if number in numbers else b"")
        donor.start_serving()


def test_it_comes_whole_from_one_donor_and_of_the_snapshots_version(tmp_path: Path) -> None:
    history = History(NUMEL)
    with crew(tmp_path) as donors:
        commit_to(history, donors, 2)
        stage(donors, history, 0, 1, 2)
        commit_to(history, donors, 1)
        joiner = Joiner(history, donors)
        report = joiner.run(with_inner=True)
        assert_same(joiner.state, history.state)
        assert report.snapshot_version == 2, "replaying all of it would be less"
        assert report.inner is not None
        assert report.inner.version == 2
        assert report.inner.data == inner_of(int(report.inner.donor.removeprefix("p")))


def test_only_some_have_one(tmp_path: Path) -> None:
    history = History(NUMEL)
    with crew(tmp_path) as donors:
        commit_to(history, donors, 2)
        stage(donors, history, 1)
        report = Joiner(history, donors).run(with_inner=True)
        assert report.inner == InnerTaken(inner_of(1), "p1", 2, "")


def test_without_any_it_says_so_and_the_shared_state_is_there_all_the_same(tmp_path: Path) -> None:
    history = History(NUMEL)
    with crew(tmp_path, 2) as donors:
        commit_to(history, donors, 2)
        stage(donors, history)
        joiner = Joiner(history, donors)
        report = joiner.run(with_inner=True)
        assert_same(joiner.state, history.state)
        assert report.inner == InnerTaken(why="no donor staged one with the snapshot")


def test_a_damaged_one_is_not_taken_and_names_its_donor(tmp_path: Path) -> None:
    """Its donor is not asked again; another one gives its own."""
    history = History(NUMEL)
    with crew(tmp_path, 2) as donors:
        commit_to(history, donors, 2)
        stage(donors, history, 0, 1)
        assert donors[0].folder is not None
        (staged,) = (donors[0].folder / "snapshots").glob("2-*/inner.safetensors")
        flip_byte(staged, PIECE_BYTES + 5)
        joiner = Joiner(history, donors)
        report = joiner.run(with_inner=True)
        assert_same(joiner.state, history.state)
        assert report.inner == InnerTaken(inner_of(1), "p1", 2, "")
        assert set(joiner.liars()) <= {"p0"}


def test_who_does_not_ask_gets_none(tmp_path: Path) -> None:
    history = History(NUMEL)
    with crew(tmp_path, 1) as donors:
        commit_to(history, donors, 2)
        stage(donors, history, 0)
        report = Joiner(history, donors).run()
        assert report.inner is None
        assert report.fetched_bytes < 8 * NUMEL + 2 * history.updates[1][0].wire_bytes
