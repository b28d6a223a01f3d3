"""K15: who is asked to end says goodbye, quickly, and the others do not wait for a timeout; asked twice, it is gone."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from atoll.dashboard.tail import EventTail
from atoll.events import TrainingStep
from support.slack import SLACK_S
from support.swarm import Swarm, environment

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.timeout(240)]

RUN = """
[run]
name = "leaving"
steps = {steps}

[model]
dim = 32
num_layers = 1
num_heads = 2
num_kv_heads = 1
ffn_dim = 64
max_seq_len = 32

[data]
sources = ["{text}"]
seq_len = 32
val_fraction = 0.2

[inner]
batch_size = 4

[outer]
inner_steps = 10

[local]
out = "{out}"
threads = 1
"""


def write_run(folder: Path, steps: int) -> Path:
    text = folder / "text"
    text.mkdir()
    for index in range(20):
        (text / f"{index}.txt").write_text(f"document {index} " * 200)
    path = folder / "run.toml"
    path.write_text(RUN.format(text=text, out=folder, steps=steps))
    return path


def start(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """`atoll ARGUMENTS`, its output in `log`."""
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "atoll", *arguments],
            env=environment(),
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
        )


def start_peer(tmp_path: Path, swarm: Swarm, peer: str, *settings: str) -> subprocess.Popen[bytes]:
    given = (f"local.coordinator={swarm.address}", f"local.peer={peer}", *settings)
    sets = [part for setting in given for part in ("--set", setting)]
    return start(tmp_path / f"{peer}.log", "train", str(tmp_path / "run.toml"), *sets)


def wait_until(what: str, holds: Callable[[], object], within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


def is_handled(process: subprocess.Popen[bytes], number: signal.Signals) -> bool:
    """Whether Python still has a handler for the signal: the first one takes it away (the kernel's SigCgt)."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    (caught,) = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return bool(caught >> (number - 1) & 1)


def ctrl_c_twice(process: subprocess.Popen[bytes]) -> None:
    """The second, sent while the first one's goodbye is held up, ends the process at once by the default action."""
    process.send_signal(signal.SIGINT)
    wait_until("the first Ctrl-C was not heard", lambda: not is_handled(process, signal.SIGINT), 10.0)
    assert process.poll() is None, "it was gone before the second Ctrl-C"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=1.0 + SLACK_S) == -signal.SIGINT  # 130 to a shell


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_a_goodbye(tmp_path: Path, number: signal.Signals, code: int) -> None:
    write_run(tmp_path, steps=400)
    # dead_s is long on purpose: only a goodbye lets the other go on at once.
    with Swarm(tmp_path, start_peers=2, run="leaving", dead_s=60.0, coordinator_lost_s=90.0) as swarm:
        goes, stays = start_peer(tmp_path, swarm, "goes"), start_peer(tmp_path, swarm, "stays")
        try:
            swarm.wait(lambda: len(swarm.events("RoundCommitted")) >= 2, within_s=150, what="two rounds")
            goes.send_signal(number)
            asked_s = time.monotonic()
            assert goes.wait(timeout=60) == code, (tmp_path / "goes.log").read_text()
            assert time.monotonic() - asked_s < 5 + SLACK_S
            assert stays.wait(timeout=120) == 0, (tmp_path / "stays.log").read_text()
        finally:
            for process in (goes, stays):
                process.kill()
                process.wait()
        left = [event["peer"] for event in swarm.events("PeerLeft")]
        assert left == ["goes", "stays"]
        assert not swarm.events("PeerLost")
        committed = swarm.events("RoundCommitted")
        assert committed[-1]["version"] == 40
        assert committed[-1]["members"] == ["stays"]
        assert "Traceback" not in (tmp_path / "goes.log").read_text()


def test_a_peer_is_gone_at_the_second_ctrl_c(tmp_path: Path) -> None:
    """Its coordinator is killed, so that its goodbye waits for a new connection, up to 2 s. Its port is free then."""
    write_run(tmp_path, steps=1_000_000)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Swarm(tmp_path, start_peers=1, run="leaving", coordinator_lost_s=90.0) as swarm:
        peer = start_peer(tmp_path, swarm, "goes", f"local.port={port}")
        try:
            swarm.wait(lambda: swarm.events("RoundCommitted"), within_s=90, what="a round")
            with pytest.raises(OSError, match="in use"):
                socket.create_server(("127.0.0.1", port))
            swarm.kill_coordinator()
            ctrl_c_twice(peer)
            socket.create_server(("127.0.0.1", port)).close()
        finally:
            peer.kill()
            peer.wait()
        assert "Traceback" not in (tmp_path / "goes.log").read_text()


def test_a_launch_is_gone_at_the_second_ctrl_c_and_leaves_no_orphans(tmp_path: Path) -> None:
    """One of its peers is frozen, and can not say goodbye: alone, the first Ctrl-C would take 10 s."""
    run_toml = write_run(tmp_path, steps=1_000_000)
    launch = start(
        tmp_path / "launch.log", "launch", str(run_toml), "--peers", "2", "--out", str(tmp_path / "runs")
    )
    children: list[psutil.Process] = []
    try:
        wait_until(
            "both peers train", lambda: training_peers(tmp_path / "runs") == {"peer-0", "peer-1"}, 90.0
        )
        children = psutil.Process(launch.pid).children(recursive=True)
        assert len(children) == 3
        next(each for each in children if "local.peer=peer-1" in each.cmdline()).suspend()
        ctrl_c_twice(launch)
        _, alive = psutil.wait_procs(children, timeout=SLACK_S)
        assert not alive
    finally:
        launch.kill()
        launch.wait()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    assert "Traceback" not in (tmp_path / "launch.log").read_text()


def training_peers(runs: Path) -> set[str]:
    """Peers of the run in the folder that have logged a step."""
    seen = [each for folder in runs.glob("leaving-*") for each in EventTail(folder).read()]
    return {each.source for each in seen if isinstance(each.event, TrainingStep)}
