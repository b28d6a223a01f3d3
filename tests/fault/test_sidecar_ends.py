"""A sidecar lives as long as its trainer, frozen or not, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from atoll.recovery.folder import make_folder
from support.asking import Asker
from support.donating import within
from support.slack import SLACK_S

pytestmark = pytest.mark.fault

SCRIPT = Path(__file__).parents[1] / "support" / "donor_process.py"


class Trainer:
    """The process, and what it said about itself."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--folder", str(folder), *options],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        port, pid, staged = self.process.stdout.readline().split()
        self.port, self.sidecar, self.folder = int(port), psutil.Process(int(pid)), Path(staged)

    def gives(self) -> bool:
        with Asker(self.port, timeout_s=SLACK_S) as asker:
            (held,) = asker.held().snapshots
            return asker.ask(f"/v1/{held.folder}/shard-00000.safetensors", "bytes=4096-8191").status == 206

    def is_gone(self) -> bool:
        """Sidecar and folder."""
        return not self.sidecar.is_running() and not self.folder.exists()


@contextmanager
def trainer(folder: Path, *options: str) -> Iterator[Trainer]:
    started = Trainer(folder, *options)
    children = psutil.Process(started.process.pid).children(recursive=True)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def test_it_gives_while_its_trainer_is_frozen(tmp_path: Path) -> None:
    with trainer(tmp_path) as started:
        assert started.gives()
        started.process.send_signal(signal.SIGSTOP)
        trainer_process = psutil.Process(started.process.pid)
        within(SLACK_S, lambda: trainer_process.status() == psutil.STATUS_STOPPED, "the freeze")
        for _ in range(3):
            assert started.gives()
            time.sleep(0.5)  # longer than it takes to notice that a trainer is gone
        started.process.send_signal(signal.SIGCONT)
        assert started.gives()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "terminated"])
def test_it_ends_with_its_trainer_and_removes_the_folder(tmp_path: Path, how: signal.Signals) -> None:
    with trainer(tmp_path) as started:
        assert started.gives()
        assert started.folder.exists()
        started.process.send_signal(how)
        assert started.process.wait(SLACK_S) == -how
        within(1.0 + SLACK_S, started.is_gone, "the end of the sidecar and its folder")


def test_it_ends_with_a_frozen_trainer_that_is_killed(tmp_path: Path) -> None:
    with trainer(tmp_path) as started:
        started.process.send_signal(signal.SIGSTOP)
        assert started.gives()
        started.process.kill()
        within(1.0 + SLACK_S, started.is_gone, "the end of the sidecar and its folder")


def test_it_ends_though_a_child_of_the_trainer_holds_the_pipe(tmp_path: Path) -> None:
    """As a data loader's worker does, which was forked and outlives the trainer."""
    with trainer(tmp_path, "--child") as started:
        children = psutil.Process(started.process.pid).children()
        assert len(children) == 2
        started.process.kill()
        started.process.wait()
        within(2.0 + SLACK_S, started.is_gone, "the end of the sidecar and its folder")
        assert [child.pid for child in children if child.is_running()] != []


def test_a_terminals_ctrl_c_is_not_for_the_sidecar(tmp_path: Path) -> None:
    with trainer(tmp_path) as started:
        assert started.gives()
        assert started.sidecar.children() == []
        assert os.getpgid(started.sidecar.pid) != os.getpgid(started.process.pid)


def test_what_both_left_behind_the_next_one_removes(tmp_path: Path) -> None:
    """Trainer and sidecar are killed at once, as when memory runs out. Not in the RAM folder that all use: there any
    other test may be the next one."""
    with trainer(tmp_path, "--ram", str(tmp_path)) as started:
        started.sidecar.send_signal(signal.SIGSTOP)
        started.process.kill()
        started.process.wait()
        started.sidecar.kill()
        within(SLACK_S, lambda: not started.sidecar.is_running(), "its death")
        assert started.folder.exists()
        make_folder("run", "p0", 1, tmp_path, ram=tmp_path).remove()
        assert not started.folder.exists()
