"""A save from staging to disk: whole or not at all, verified before `latest`, and never a reason to stop training."""

from __future__ import annotations

import logging
import os
import resource
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from atoll.checkpoint.folder import CheckpointFolder
from atoll.checkpoint.saver import Keeping
from atoll.diloco.outer import OuterState
from atoll.diloco.round_report import RoundReport
from atoll.diloco.safekeeping import Safekeeping
from atoll.diloco.schedule import RoundShape
from atoll.diloco.scribe import Scribe
from atoll.events import CheckpointFailed, CheckpointSaved, CheckpointsCounted, CheckpointSkipped
from atoll.mesh.crew import Crew
from atoll.state.layout import Layout
from atoll.state.snapshot import read_snapshot
from atoll.values import ParameterInfo
from support.saving import NUMEL, WAIT_S, bench

NOWHERE = Path("/proc/sys/atoll")
"""Nobody may make a folder there, root neither."""

COMMIT = RoundReport(
    committed=True,
    round=1,
    shape=RoundShape(1, 0.7, 0.9, True),
    version=1,
    members=("a",),
    contributors=("a",),
    left_out="",
    reason="",
    ends=False,
    end_reason="",
    digest="",
    delta_norm=1.0,
    sent_bytes=0,
    received_bytes=0,
    attempts=1,
    saves=True,
)


@dataclass
class StandIn:
    """As much of a loop as safekeeping asks."""

    state: OuterState
    last_commit: RoundReport | None = None
    steps_in_round: int = 0


def test_a_save_is_read_back_to_the_bit(tmp_path: Path) -> None:
    with bench(tmp_path) as peer:
        peer.save(5)
        folder = CheckpointFolder(peer.place)
        state = read_snapshot(folder.shared(5))
        assert state.anchor.tobytes() == peer.state.anchor.tobytes()
        assert state.velocity.tobytes() == peer.state.velocity.tobytes()
        assert (state.version, state.round, state.step) == (5, 5, 50)
        latest = folder.latest()
        assert latest is not None
        assert (latest.version, latest.digest) == (5, peer.state.digest())
        own, path = folder.read_own("a", 5)
        assert own.digest == latest.digest
        assert path.stat().st_size == own.files[0].size_bytes
        assert own.state["inner"]["dict"][1] == ["note", "of version 5"]
    (saved,) = peer.of(CheckpointSaved)
    assert saved.version == 5
    assert saved.shared_bytes > 8 * NUMEL
    assert peer.of(CheckpointsCounted) == [CheckpointsCounted(saved=1, skipped=0, failed=0, newest=5)]


def test_the_newest_and_every_fourth_are_kept(tmp_path: Path) -> None:
    with bench(tmp_path, keep_last=2, keep_every=4) as peer:
        for version in range(3, 11):
            peer.save(version)
        folder = CheckpointFolder(peer.place)
        assert folder.all_versions() == [10, 9, 8, 4]
        assert folder.own_versions("a") == [10, 9, 8, 4]
    assert [v for event in peer.of(CheckpointSaved) for v in event.removed] == [3, 5, 6, 7]


def test_peers_of_one_machine_write_the_shared_part_once(tmp_path: Path) -> None:
    place = tmp_path / "place"
    with bench(tmp_path, place=place) as first, bench(tmp_path, place=place, peer="b/ö") as second:
        for peer in (first, second):
            peer.save(2)
        assert second.of(CheckpointSaved)[0].shared_bytes == 0
        assert CheckpointFolder(place).read_own("b/ö", 2)[0].peer == "b/ö"


def test_what_a_roll_back_left_behind_goes_and_is_not_the_newest(tmp_path: Path) -> None:
    with bench(tmp_path) as peer:
        for version in (2, 3, 4):
            peer.save(version, term=1)
        peer.advance(3)
        peer.state.anchor += 1
        peer.save_as_it_is(term=2)
        folder = CheckpointFolder(peer.place)
        assert [(each.version, each.term) for each in folder.versions()] == [(3, 2), (2, 1)]
        latest = folder.latest()
        assert latest is not None
        assert latest.digest == peer.state.digest()


def test_a_version_that_is_made_again_after_a_roll_back_is_not_taken_for_the_saved_one(
    tmp_path: Path,
) -> None:
    with bench(tmp_path) as peer:
        peer.save(4, term=1)
        assert peer.saver.has(4, 1)
        assert not peer.saver.has(4, 2)
        assert not peer.saver.has(3, 2), "of the history before the roll-back"
        peer.save(3, term=2, wait=False)
        assert peer.saver.has(3, 2), "on its way"
        peer.saver.wait(WAIT_S)
        assert peer.saver.has(3, 2)
        assert not peer.saver.has(4, 2)


def test_who_lives_through_a_roll_back_saves_what_is_made_again(tmp_path: Path) -> None:
    with bench(tmp_path) as peer:
        keeping = Keeping(tmp_path / "kept")
        safe = Safekeeping(keeping, run="run", peer="a", emit=peer.events.append, fresh=False)
        loop = StandIn(peer.state)
        exchange = SimpleNamespace(staging=peer.donor, scribe=Scribe(Crew.alone()))
        safe.open(exchange, loop, Layout((ParameterInfo("w", (NUMEL,), "float32"),)))  # type: ignore[arg-type]
        for term, version in [(1, 4), (1, 5), (2, 4), (2, 4)]:
            peer.advance(version)
            peer.state.anchor += term
            loop.last_commit = replace(COMMIT, term=term, version=version, digest=peer.state.digest())
            safe.safe_point(loop)  # type: ignore[arg-type]
            assert safe._saver is not None
            safe._saver.wait(WAIT_S)
        safe.close(WAIT_S)
        found = CheckpointFolder(keeping.path).versions()
        assert (found[0].version, found[0].term) == (4, 2)
    assert [event.version for event in peer.of(CheckpointSaved)] == [4, 5, 4]


@pytest.mark.parametrize("vector", ["anchor", "velocity"])
def test_a_state_that_is_not_finite_is_never_the_latest(tmp_path: Path, vector: str) -> None:
    with bench(tmp_path) as peer:
        peer.save(1)
        peer.advance(2)
        getattr(peer.state, vector)[NUMEL // 2] = np.inf
        peer.save_as_it_is()
        folder = CheckpointFolder(peer.place)
        assert folder.all_versions() == [1]
        assert folder.latest().version == 1  # type: ignore[union-attr]
    (failed,) = peer.of(CheckpointFailed)
    assert failed.reason == f"the {vector} of version 2 is not finite"


def test_bits_that_changed_since_the_commit_are_not_saved(tmp_path: Path) -> None:
    with bench(tmp_path) as peer:
        peer.save(1)
        peer.advance(2)
        digest = peer.state.digest()
        peer.state.anchor.view(np.uint32)[17] ^= 1
        peer.save_as_it_is(digest=digest)
        assert CheckpointFolder(peer.place).all_versions() == [1]
    (failed,) = peer.of(CheckpointFailed)
    assert "elements 0 to 3000 of the anchor do not have the digest" in failed.reason


def test_a_writer_that_is_behind_means_a_skipped_save_and_no_wait(tmp_path: Path) -> None:
    with bench(tmp_path) as peer:
        peer.save(1)
        assert peer.saver.pid is not None
        os.kill(peer.saver.pid, signal.SIGSTOP)
        peer.save(2, wait=False)
        assert not peer.saver.is_free(3)
        os.kill(peer.saver.pid, signal.SIGCONT)
        peer.saver.wait(WAIT_S)
        peer.save(4)
        assert CheckpointFolder(peer.place).all_versions() == [4, 2, 1]
    assert peer.of(CheckpointSkipped) == [
        CheckpointSkipped(version=3, reason="version 2 is still being written")
    ]
    assert peer.of(CheckpointsCounted) == [CheckpointsCounted(saved=3, skipped=1, failed=0, newest=4)]


def test_a_save_that_is_being_written_is_not_staged_over_by_joiners(tmp_path: Path) -> None:
    with bench(tmp_path) as peer:
        peer.save(1)
        assert peer.saver.pid is not None
        os.kill(peer.saver.pid, signal.SIGSTOP)
        peer.save(2, wait=False)
        for version in (3, 4, 5):
            peer.advance(version)
            assert peer.donor.stage(peer.state)
        os.kill(peer.saver.pid, signal.SIGCONT)
        peer.saver.wait(WAIT_S)
        assert read_snapshot(CheckpointFolder(peer.place).shared(2)).velocity[0] == 2


def test_a_killed_writer_costs_its_save_and_the_next_has_another_one(tmp_path: Path) -> None:
    with bench(tmp_path) as peer:
        peer.save(1)
        assert peer.saver.pid is not None
        os.kill(peer.saver.pid, signal.SIGSTOP)
        peer.save(2, wait=False)
        os.kill(peer.saver.pid, signal.SIGKILL)
        peer.saver.wait(WAIT_S)
        assert CheckpointFolder(peer.place).latest().version == 1  # type: ignore[union-attr]
        peer.save(3)
        assert CheckpointFolder(peer.place).latest().version == 3  # type: ignore[union-attr]
    (failed,) = peer.of(CheckpointFailed)
    assert failed.reason == "the writer process is lost: it ended in the middle of it (SIGKILL)"


def test_a_writer_that_died_between_saves_is_replaced(tmp_path: Path) -> None:
    with bench(tmp_path) as peer:
        peer.save(1)
        process = peer.saver._writer._process
        assert process is not None
        process.kill()
        process.wait()
        peer.save(2)
        assert CheckpointFolder(peer.place).latest().version == 2  # type: ignore[union-attr]
    assert not peer.of(CheckpointFailed)


def test_unfinished_things_are_swept_by_the_next_writer(tmp_path: Path) -> None:
    for name in ("shared/.00000001.abcd.partial", "peers/a/.00000001.abcd.partial"):
        (tmp_path / "place" / name).mkdir(parents=True)
    (tmp_path / "place" / ".latest.abcd.partial").write_text("half")
    with bench(tmp_path) as peer:
        peer.save(2)
    assert not list((tmp_path / "place").rglob("*.partial"))


def test_a_full_disk_costs_saves_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with bench(tmp_path) as peer:
        peer.save(1)
        assert peer.saver.pid is not None
        resource.prlimit(peer.saver.pid, resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
        for version in (2, 3):
            peer.save(version)
        assert CheckpointFolder(peer.place).all_versions() == [1]
        assert not list(peer.place.rglob("*.partial"))
        resource.prlimit(
            peer.saver.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )
        peer.save(4)
        assert CheckpointFolder(peer.place).latest().version == 4  # type: ignore[union-attr]
    assert [event.version for event in peer.of(CheckpointFailed)] == [2, 3]
    assert "file too large" in peer.of(CheckpointFailed)[0].reason
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1, "one warning, however often it fails"


@pytest.mark.parametrize("case", ["nobody may write there", "it is a file"])
def test_a_place_that_cannot_be_used_costs_saves_and_nothing_else(tmp_path: Path, case: str) -> None:
    place = NOWHERE
    if case == "it is a file":
        place = tmp_path / "file"
        place.write_text("")
    with bench(tmp_path, place=place) as peer:
        peer.save(1)
        peer.save(2)
    assert [(event.version, event.number) for event in peer.of(CheckpointFailed)] == [(1, 1), (2, 2)]
    assert peer.of(CheckpointsCounted)[0].failed == 2


def test_where_ram_has_no_room_the_disk_is_staged_on_with_one_warning_that_names_the_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with bench(tmp_path, ram=tmp_path / "no-ram") as peer:
        peer.save(1)
        peer.save(2)
        assert CheckpointFolder(peer.place).latest().version == 2  # type: ignore[union-attr]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"{tmp_path / 'no-ram'} has 0 bytes free and staging needs" in warning


def test_where_nothing_can_be_staged_saves_fail_and_training_goes_on(tmp_path: Path) -> None:
    with bench(tmp_path, ram=tmp_path / "no-ram", fallback=NOWHERE) as peer:
        peer.save(1)
        assert not peer.of(CheckpointSaved)
    (failed,) = peer.of(CheckpointFailed)
    assert "no place to stage snapshots" in failed.reason


def test_closing_waits_for_the_last_save(tmp_path: Path) -> None:
    with bench(tmp_path, numel=4_000_000) as peer:
        peer.save(1, wait=False)
        peer.saver.close(WAIT_S)
        assert CheckpointFolder(peer.place).latest().version == 1  # type: ignore[union-attr]
        assert peer.saver.pid is None
