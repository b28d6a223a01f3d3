"""RAM that others fill in the middle of a run: saves go another way or come to nothing, and training never stops."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.checkpoint.folder import CheckpointFolder
from atoll.config.load import load
from atoll.events import CheckpointFailed, CheckpointsCounted, Event, RoundApplied
from atoll.train.build import run_peer
from support.fake_peer import QUICK, TOKEN, CoordinatorThread
from support.saving import bench
from support.small_ram import fill, tmpfs

SIZE_MB = 80
"""Room for all that this small model needs, and not for much more."""
FILLED_AT, ROUNDS, INNER_STEPS = 2, 6, 2


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "ram", SIZE_MB) as folder:
        yield folder


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """All but the word about a save that takes its time, as it does on a busy machine."""
    said = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    return [each for each in said if not each.startswith("waiting for the save")]


def run(tmp_path: Path, ram: Path, *, fill_at: int) -> list[Event]:
    """A peer with a save after every round; the RAM that it stages in is full from the round `fill_at` on."""
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(f"document {number} says {number * number}. " * 40)
    events: list[Event] = []
    taken: list[int] = []

    def sink(wall_time_s: float, source: str, event: Event) -> None:
        events.append(event)
        if isinstance(event, RoundApplied) and event.version == fill_at:
            taken.append(fill(ram))

    with CoordinatorThread(
        tmp_path / "journal", run_settings=None, save_rounds=1, timeouts=QUICK
    ) as coordinator:
        settings = {
            "run.name": "run",
            "run.steps": ROUNDS * INNER_STEPS,
            "model.dim": 16,
            "model.num_layers": 1,
            "model.num_heads": 2,
            "model.num_kv_heads": 1,
            "model.ffn_dim": 32,
            "model.max_seq_len": 32,
            "data.sources": f'["{tmp_path / "text"}"]',
            "data.seq_len": 32,
            "data.slots": 4,
            "inner.batch_size": 2,
            "outer.inner_steps": INNER_STEPS,
            "eval.sequences": 2,
            "checkpoint.staging": ram,
            "local.coordinator": coordinator.address,
            "local.peer": "a",
            "local.out": tmp_path / "out",
            "local.threads": 1,
        }
        config = load(None, [f"{key}={value}" for key, value in settings.items()], {})
        run_peer(config, token=TOKEN, sinks=[sink])
    assert taken, "the RAM was filled in the middle of the run"
    return events


def test_training_goes_on_and_the_disk_is_staged_on_with_one_warning_that_names_the_bytes(
    tmp_path: Path, ram: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = run(tmp_path, ram, fill_at=FILLED_AT)
    assert [each.version for each in events if isinstance(each, RoundApplied)] == [*range(1, ROUNDS + 1)]
    (counted,) = [each for each in events if isinstance(each, CheckpointsCounted)]
    assert (counted.failed, counted.newest) == (0, ROUNDS)
    latest = CheckpointFolder(tmp_path / "out" / "run" / "checkpoints").latest()
    assert latest is not None
    assert latest.version == ROUNDS
    (warning,) = warnings(caplog)
    assert re.search(rf"{re.escape(str(ram))} has \d+ bytes free and staging needs \d+: staging in ", warning)


def test_where_the_disk_is_full_too_saves_fail_one_warning_names_the_bytes_and_all_are_counted(
    tmp_path: Path, ram: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with bench(tmp_path, ram=ram, fallback=Path("/proc/sys/atoll")) as peer:
        peer.save(1)
        before = os.statvfs(ram)
        assert fill(ram) > 0
        assert os.statvfs(ram).f_bavail < before.f_bavail
        for version in (2, 3):
            peer.save(version)
        assert CheckpointFolder(peer.place).all_versions() == [1]
        (ram / "ballast").unlink()
        peer.save(4)
        assert CheckpointFolder(peer.place).all_versions() == [4, 1]
    assert [each.version for each in peer.of(CheckpointFailed)] == [2, 3]
    assert peer.of(CheckpointsCounted) == [CheckpointsCounted(saved=2, skipped=0, failed=2, newest=4)]
    (warning,) = warnings(caplog)
    assert re.search(r"has \d+ bytes free of the \d+ needed", warning), "one, however often it fails"
