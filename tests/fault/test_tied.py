"""A test session that is killed leaves no process behind, not even those that are frozen."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from support.swarm import environment
from support.tied import tied

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]

TESTS = Path(__file__).parents[1]
SLEEPER = "import time; print('here', flush=True); time.sleep(600)"
OF_A_NURSERY = """
from support.swarm import nursery
log = Path(folder, "sleeper.log")
log.touch()
pid = nursery().start(Path(folder, "sleeper.py"), [], log).pid
while not log.read_text():
    time.sleep(0.01)
"""
OF_ITS_OWN = """
from support.tied import tied
command = tied([sys.executable, "-c", Path(folder, "sleeper.py").read_text()])
process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
process.stdout.readline()
pid = process.pid
"""
SESSION = """
import os, signal, subprocess, sys, time
from pathlib import Path
folder = sys.argv[1]
{start}
os.kill(pid, signal.SIGSTOP)
print(pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("start", [OF_A_NURSERY, OF_ITS_OWN], ids=["nursery", "own"])
def test_frozen_children_of_a_killed_session_are_gone(tmp_path: Path, start: str) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    command = [sys.executable, "-c", SESSION.format(start=start), str(tmp_path)]
    paths = ":".join([str(TESTS), *(path for path in sys.path if path)])
    with subprocess.Popen(
        command, env={**environment(), "PYTHONPATH": paths}, stdout=subprocess.PIPE
    ) as session:
        try:
            assert session.stdout is not None
            child = psutil.Process(int(session.stdout.readline()))
            wait_until(lambda: child.status() == psutil.STATUS_STOPPED)
        finally:
            session.kill()
        assert session.wait(10) == -signal.SIGKILL
        try:
            wait_until(lambda: not alive(child))
        finally:
            if alive(child):
                child.kill()


def test_a_command_that_is_tied_keeps_its_words_and_its_exit_code() -> None:
    said = subprocess.run(
        tied(["sh", "-c", 'echo "$1"; exit 7', "sh", "two words"]), capture_output=True, text=True
    )
    assert (said.stdout, said.returncode) == ("two words\n", 7)


def test_the_parent_that_is_gone_already_is_noticed() -> None:
    command = tied([sys.executable, "-c", "print('ran')"])
    command[4] = "1"  # as if it had another parent by now
    said = subprocess.run(command, capture_output=True, text=True)
    assert (said.stdout, said.returncode) == ("", 128 + signal.SIGKILL)


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(true: Callable[[], bool], within_s: float = 30.0) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
