"""K15: who is asked to end says goodbye, quickly, and the others do not wait for a timeout; asked twice, it is gone."""

from __future__ import annotations

import contextlib
import os
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
from atoll.signals import GONE_S
from support.slack import SLACK_S
from support.small_run import write_small_run
from support.swarm import Swarm, environment

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.timeout(240)]

BLOCKED_TRAIN = Path(__file__).parents[1] / "support" / "blocked_train.py"


def write_run(folder: Path, steps: int) -> Path:
    return write_small_run(folder, "leaving", {"local.out": str(folder)}, steps=steps)


ATOLL = ("-m", "atoll")


def start(log: Path, *arguments: str, program: tuple[str, ...] = ATOLL) -> subprocess.Popen[bytes]:
    """`atoll ARGUMENTS`, its output in `log`."""
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *program, *arguments],
            env={**environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
        )


def start_peer(
    tmp_path: Path, swarm: Swarm, peer: str, *settings: str, program: tuple[str, ...] = ATOLL
) -> subprocess.Popen[bytes]:
    given = (f"local.coordinator={swarm.address}", f"local.peer={peer}", *settings)
    sets = [part for setting in given for part in ("--set", setting)]
    log, run_toml = tmp_path / f"{peer}.log", str(tmp_path / "run.toml")
    return start(log, "train", run_toml, *sets, program=program)


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


def test_a_trainer_is_asked_to_leave_and_then_the_run_is_stopped(tmp_path: Path) -> None:
    """Who leaves in the middle of a round has no model to save; who stays to the end saves it."""
    write_run(tmp_path, steps=1_000_000)
    model = tmp_path / "leaving" / "model.safetensors"
    with Swarm(tmp_path, start_peers=2, run="leaving", dead_s=60.0, coordinator_lost_s=90.0) as swarm:
        goes, stays = start_peer(tmp_path, swarm, "goes"), start_peer(tmp_path, swarm, "stays")
        try:
            swarm.wait(lambda: len(swarm.events("RoundCommitted")) >= 2, within_s=150, what="two rounds")
            assert swarm.order("leave", "goes").returncode == 0
            assert goes.wait(timeout=5 + SLACK_S) == 0, (tmp_path / "goes.log").read_text()
            assert not model.exists()
            alone = len(swarm.events("RoundCommitted"))
            swarm.wait(
                lambda: len(swarm.events("RoundCommitted")) > alone, within_s=SLACK_S, what="a round of one"
            )
            assert swarm.order("stop", "--reason", "enough").returncode == 0
            assert stays.wait(timeout=5 + SLACK_S) == 0, (tmp_path / "stays.log").read_text()
            assert model.exists()
        finally:
            for process in (goes, stays):
                process.kill()
                process.wait()
        left = [(event["peer"], event["reason"]) for event in swarm.events("PeerLeft")]
        assert left == [
            ("goes", "asked to leave by an operator"),
            ("stays", "the run was stopped by an operator: enough"),
        ]
        assert not swarm.events("PeerLost")


def test_a_peer_in_one_long_call_says_goodbye_and_is_gone(tmp_path: Path) -> None:
    """No handler of Python's can run there, as in a backward pass of a minute."""
    write_run(tmp_path, steps=100_000)
    marker = tmp_path / "marker"
    blocked = (str(BLOCKED_TRAIN), str(marker), "15")
    with Swarm(tmp_path, start_peers=2, run="leaving", dead_s=60.0, coordinator_lost_s=90.0) as swarm:
        goes = start_peer(tmp_path, swarm, "goes", program=blocked)
        stays = start_peer(tmp_path, swarm, "stays")
        try:
            swarm.wait(marker.exists, within_s=150, what="the long call")
            goes.send_signal(signal.SIGTERM)
            asked_s = time.monotonic()
            assert goes.wait(timeout=GONE_S + SLACK_S) == 143, (tmp_path / "goes.log").read_text()
            print(f"gone after {time.monotonic() - asked_s:.2f} s")
            alone = len(swarm.events("RoundCommitted"))
            swarm.wait(
                lambda: len(swarm.events("RoundCommitted")) > alone, within_s=SLACK_S, what="a round of one"
            )
        finally:
            for process in (goes, stays):
                process.kill()
                process.wait()
        (left,) = swarm.events("PeerLeft")
        assert (left["peer"], left["reason"]) == ("goes", "stopped by SIGTERM")
        assert not swarm.events("PeerLost")
        assert "still busy 4 s after SIGTERM" in (tmp_path / "goes.log").read_text()


def test_a_peer_that_has_not_begun_is_gone_too(tmp_path: Path) -> None:
    """While torch is imported, say: the signal comes as soon as Python has a handler for it."""
    write_run(tmp_path, steps=100)
    with Swarm(tmp_path, start_peers=1, run="leaving") as swarm:
        peer = start_peer(tmp_path, swarm, "goes")
        try:
            wait_until("it handles signals", lambda: is_handled(peer, signal.SIGTERM), 60.0)
            peer.send_signal(signal.SIGTERM)
            assert peer.wait(timeout=5 + SLACK_S) == 143, (tmp_path / "goes.log").read_text()
        finally:
            peer.kill()
            peer.wait()
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
        assert len(children) == 5, "the coordinator, two peers, and their writers"
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


@pytest.mark.parametrize("command", ["launch", "demo"])
def test_one_ctrl_c_ends_all_processes_of_a_local_run(tmp_path: Path, command: str) -> None:
    runs = tmp_path / "runs"
    what = [str(write_run(tmp_path, steps=1_000_000))] if command == "launch" else ["--seconds", "600"]
    whole = start(tmp_path / "whole.log", command, *what, "--peers", "2", "--out", str(runs))
    children: list[psutil.Process] = []
    try:
        wait_until("both peers train", lambda: training_peers(runs) == {"peer-0", "peer-1"}, 150.0)
        children = psutil.Process(whole.pid).children(recursive=True)
        assert len(children) == 5, "the coordinator, two peers, and their writers"
        whole.send_signal(signal.SIGINT)
        asked_s = time.monotonic()
        assert whole.wait(timeout=5 + 2 * SLACK_S) == 130, (tmp_path / "whole.log").read_text()
        print(f"{command} gone after {time.monotonic() - asked_s:.2f} s")
        _, alive = psutil.wait_procs(children, timeout=SLACK_S)
        assert not alive
    finally:
        whole.kill()
        whole.wait()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    assert "Traceback" not in (tmp_path / "whole.log").read_text()
    for name in ("peer-0", "peer-1", "coordinator"):
        (log,) = runs.glob(f"*/{name}.log")
        assert "Traceback" not in log.read_text()


def training_peers(runs: Path) -> set[str]:
    """Peers of the run in the folder that have logged a step."""
    seen = [each for folder in runs.glob("*-*") for each in EventTail(folder).read()]
    return {each.source for each in seen if isinstance(each.event, TrainingStep)}
