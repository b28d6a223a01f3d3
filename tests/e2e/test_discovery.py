"""`atoll join dht:...`: with nothing but bootstrap peers a newcomer finds the run, and again when that has moved."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

pytest.importorskip("kademlia", reason="the extra [dht] is not installed")

from atoll.events import read_events
from support.small_run import write_small_run
from support.swarm import environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def test_a_run_is_found_by_any_bootstrap_peer_and_again_when_it_moved(tmp_path: Path) -> None:
    run_toml = write_small_run(tmp_path, "found", {"local.out": str(tmp_path)})
    events = tmp_path / "found" / "a.jsonl"
    bootstrap, serves = free_port(), free_port()
    of_coordinator = ["coordinator", run_toml, "--bind", "127.0.0.1:0", "--set", "dht.enabled=true"]
    own = {
        "local.out": f'"{tmp_path}"',
        "local.peer": "a",
        "local.threads": 1,
        "data.sources": f'["{tmp_path}/text"]',
        "dht.port": serves,
    }
    with ExitStack() as stack:
        first = start(stack, tmp_path / "c1.log", *of_coordinator, "--new", "--set", f"dht.port={bootstrap}")
        old, run, authority = join_line_of(tmp_path / "c1.log")
        line = f"dht:127.0.0.1:1,127.0.0.1:{bootstrap}"  # nobody is at the first
        join = ["join", line, "--run", run, "--authority", authority]
        settings = [word for key, value in own.items() for word in ("--set", f"{key}={value}")]
        token = ["--token-file", tmp_path / "found" / "join.token"]
        start(stack, tmp_path / "a.log", *join, *settings, *token)
        wait_until(lambda: versions(events), "a first commit")
        assert f"atoll {' '.join(join)}" in (tmp_path / "a.log").read_text(), "ready to paste"

        first.send_signal(signal.SIGKILL)
        assert first.wait(10) == -signal.SIGKILL, "the only bootstrap peer that was there is gone, too"
        committed = len(versions(events))
        start(stack, tmp_path / "c2.log", *of_coordinator, "--set", f"dht.bootstrap=127.0.0.1:{serves}")
        new, *_ = join_line_of(tmp_path / "c2.log")
        assert new != old, "the fault: it is elsewhere"
        wait_until(lambda: len(versions(events)) > committed + 2, "a commit under the second coordinator")
        assert f"the coordinator is said to be at {new} by now" in (tmp_path / "a.log").read_text()


def join_line_of(log: Path) -> tuple[str, str, str]:
    """Address, run and authority."""
    pattern = r"join: atoll join (\S+) --run (\S+) --authority (\S+)"
    wait_until(lambda: re.search(pattern, log.read_text()), f"the join line in {log.name}")
    found = re.search(pattern, log.read_text())
    assert found is not None
    return found[1], found[2], found[3]


def start(stack: ExitStack, log: Path, *arguments: object) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "atoll", *map(str, arguments)],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=stack.enter_context(log.open("wb")),
        stderr=subprocess.STDOUT,
    )
    stack.callback(process.wait, 30)
    stack.callback(process.kill)
    return process


def wait_until(holds: Callable[[], object], what: str, within_s: float = 90.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, f"{what}: not within {within_s} s"
        time.sleep(0.05)


def versions(events: Path) -> list[int]:
    lines = [line.event for _, line, _ in read_events(events)] if events.exists() else []
    return [event["version"] for event in lines if event["type"] == "RoundApplied"]


def free_port() -> int:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
