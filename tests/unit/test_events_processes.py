"""What is told of training never stands in its way: a full disk is one line and exit 3, a closed stdout is nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.cli.main import run
from atoll.events import (
    CoordinatorListening,
    Event,
    JsonLinesSink,
    PeerKilled,
    PeerLeft,
    RunEnded,
    read_events,
)

TOKEN = "a token for tests only"
RUN = """
[run]
name = "told"
steps = {steps}

[model]
dim = 32
num_layers = 1
num_heads = 2
num_kv_heads = 1
ffn_dim = 64
max_seq_len = 32

[data]
sources = ["text"]
seq_len = 32
val_fraction = 0.2

[inner]
batch_size = 2

[outer]
inner_steps = 2

[membership]
start_peers = 1
quorum_wait_s = 2

[local]
out = "."
threads = 1
log_every = 1
"""

Process = subprocess.Popen[bytes]


@pytest.fixture
def started() -> Iterator[list[Process]]:
    """Processes that the test started; none outlives it."""
    processes: list[Process] = []
    yield processes
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what the shell started, too
        process.wait()


def prepare(folder: Path, steps: int) -> None:
    (folder / "text").mkdir()
    for index in range(20):
        (folder / "text" / f"{index}.txt").write_text(f"document {index} " * 200)
    (folder / "run.toml").write_text(RUN.format(steps=steps))


def start(folder: Path, name: str, *, shell: str) -> Process:
    """Run a line of bash, where `atoll` is the command; stdout and stderr in NAME.log."""
    environment = {
        **os.environ,
        "ATOLL_TOKEN": TOKEN,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    script = f'atoll() {{ "{sys.executable}" -m atoll "$@"; }}; {shell}'
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def events(path: Path) -> list[Event | None]:
    return [event for _, _, event in read_events(path)] if path.exists() else []


def address(folder: Path) -> str:
    """Where the coordinator listens, once it does."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        for event in events(folder / "told" / "coordinator.jsonl"):
            if isinstance(event, CoordinatorListening):
                return event.address
        time.sleep(0.02)
    raise AssertionError((folder / "coordinator.log").read_text())


COORDINATOR = "atoll coordinator run.toml --bind 127.0.0.1:0"
PEER = "atoll train run.toml --set local.peer=p --set local.coordinator="


@pytest.mark.fault
def test_a_closed_stdout_never_ends_training(tmp_path: Path, started: list[Process]) -> None:
    prepare(tmp_path, steps=40)
    head = "2>&1 | head -1; exit ${PIPESTATUS[0]}"
    started.append(start(tmp_path, "coordinator", shell=f"{COORDINATOR} {head}"))
    started.append(start(tmp_path, "p", shell=f"{PEER}{address(tmp_path)} {head}"))
    assert [process.wait(90) for process in started] == [0, 0]
    for name in ("coordinator", "p"):
        assert len((tmp_path / f"{name}.log").read_text().splitlines()) == 1, "head had its line and left"
        last = events(tmp_path / "told" / f"{name}.jsonl")[-1]
        assert isinstance(last, RunEnded)
        assert last.exit_code == 0
    assert (tmp_path / "told" / "model.safetensors").exists()


@pytest.mark.fault
def test_a_peer_without_space_says_goodbye(tmp_path: Path, started: list[Process]) -> None:
    prepare(tmp_path, steps=4000)
    started.append(start(tmp_path, "coordinator", shell=COORDINATOR))
    started.append(start(tmp_path, "p", shell=f"ulimit -f 16; {PEER}{address(tmp_path)} > /dev/null"))
    assert started[1].wait(90) == 3, (tmp_path / "p.log").read_text()
    *others, line = (tmp_path / "p.log").read_text().splitlines()
    said = ("update", "room is kept for saves", "cannot be staged")
    assert all(any(word in other for word in said) for other in others), (
        "what is kept is limited too, and says so"
    )
    assert line == (
        "atoll: error: cannot write events to told/p.jsonl: file too large; make room there or set local.out"
    )
    assert started[0].wait(60) == 6
    (left,) = [e for e in events(tmp_path / "told" / "coordinator.jsonl") if isinstance(e, PeerLeft)]
    assert left.reason.startswith("cannot write events to told/p.jsonl")


@pytest.mark.fault
def test_a_coordinator_without_space_ends(tmp_path: Path, started: list[Process]) -> None:
    prepare(tmp_path, steps=4000)
    sink = JsonLinesSink(
        tmp_path / "told" / "coordinator.jsonl"
    )  # nearly full: the journal must not be first
    for _ in range(150):
        sink(0.0, "coordinator", PeerKilled(peer="old", signal="SIGKILL"))
    sink.close()
    started.append(start(tmp_path, "coordinator", shell=f"ulimit -f 16; {COORDINATOR} > /dev/null"))
    started.append(start(tmp_path, "p", shell=PEER + address(tmp_path)))
    assert started[0].wait(90) == 3, (tmp_path / "coordinator.log").read_text()
    (line,) = (tmp_path / "coordinator.log").read_text().splitlines()
    assert line == (
        "atoll: error: cannot write events to told/coordinator.jsonl: file too large; "
        "make room there or set local.out"
    )
    assert None not in events(tmp_path / "told" / "coordinator.jsonl"), "whole lines"


def test_a_coordinator_that_cannot_tell_anything_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN)
    (tmp_path / "coordinator.jsonl").symlink_to("/dev/full")
    assert run(["coordinator", "--run", "r", "--bind", "127.0.0.1:0", "--out", str(tmp_path)]) == 3
    said = capsys.readouterr()
    assert said.err == (
        f"atoll: error: cannot write events to {tmp_path}/coordinator.jsonl: no space left on device; "
        "make room there or set local.out\n"
    )
    assert "join:" not in said.out
