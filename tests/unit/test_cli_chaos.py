"""`atoll chaos`: what it does to the peers of a run on this machine, and whom it never touches."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from atoll.cli import children
from atoll.cli.chaos import parse_kinds
from atoll.cli.launch import in_fresh_folder, with_peers
from atoll.cli.local_peers import LocalPeers
from atoll.cli.local_run import LocalRun
from atoll.cli.main import run
from atoll.cli.rehearsal import Rehearsal
from atoll.config.load import load
from atoll.errors import ConfigError
from atoll.events import FaultPlayed, JsonLinesSink, PeerKilled, RunStarted, read_events

STUB = Path(__file__).parents[1] / "support" / "stub_atoll.py"
SLACK_S = 20.0


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "PROGRAM", (sys.executable, str(STUB)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@pytest.fixture
def local_run(tmp_path: Path) -> Iterator[LocalRun]:
    config = in_fresh_folder(with_peers(load(None, ["run.name=lasts"], {}), 3), tmp_path)
    with LocalRun(config, num_peers=3) as started:
        started.start()
        wait_until(lambda: len(living(started.folder)) == 3)
        yield started


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + SLACK_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)


def living(folder: Path) -> dict[str, int]:
    """Names and process ids; none while no peer has told of its start yet."""
    if not [event for path in folder.glob("peer-*.jsonl") for _, _, event in read_events(path)]:
        return {}
    return {name: peer.process.pid for name, peer in LocalPeers(folder).living().items()}


def rehearsal_of(folder: Path, *kinds: str, said: list[str], min_living: int = 1) -> Rehearsal:
    return Rehearsal(
        folder,
        kinds=kinds,
        random=random.Random(4),
        min_living=min_living,
        stop_s=60,
        say=said.append,
    )


def told(folder: Path) -> list[object]:
    return [event for _, _, event in read_events(folder / "chaos.jsonl")]


def test_a_peer_is_killed_and_comes_back_as_it_was(local_run: LocalRun) -> None:
    said: list[str] = []
    before = living(local_run.folder)
    with rehearsal_of(local_run.folder, "kill", said=said) as kills:
        kills.play()
        (killed,) = [event.peer for event in told(local_run.folder) if isinstance(event, PeerKilled)]
        wait_until(lambda: set(living(local_run.folder)) == set(before) - {killed})
        kills._kinds = ("join",)
        kills.play()
        wait_until(lambda: set(living(local_run.folder)) == set(before))
        assert living(local_run.folder)[killed] != before[killed]
        argv = json.loads((local_run.folder / f"{killed}.seen").read_text())["argv"]
        assert argv[1:3] == ["train", str(local_run.folder / "config.toml")]
    assert said[:2] == [f"{killed} was killed (SIGKILL), on purpose", f"{killed} was started, on purpose"]
    assert killed not in living(local_run.folder), "what the rehearsal started ends with it"


def test_who_killed_a_peer_is_no_failure_of_the_run(local_run: LocalRun) -> None:
    with rehearsal_of(local_run.folder, "kill", "leave", said=[]) as faults:
        faults.play()
        faults.play()
        wait_until(lambda: len(living(local_run.folder)) == 1)
    local_run.poll()
    local_run.raise_failure()


def test_a_newcomer_is_started_like_another_peer(local_run: LocalRun) -> None:
    with rehearsal_of(local_run.folder, "join", said=[]) as joins:
        joins.play()
        (joined,) = [event.peer for event in told(local_run.folder) if isinstance(event, FaultPlayed)]
        wait_until(lambda: len(living(local_run.folder)) == 4)
        assert joined in living(local_run.folder)


def test_what_it_stopped_goes_on_when_it_ends(local_run: LocalRun) -> None:
    said: list[str] = []
    with rehearsal_of(local_run.folder, "stop", said=said) as stops:
        stops.play()
        (stopped,) = [event.peer for event in told(local_run.folder) if isinstance(event, FaultPlayed)]
        process = psutil.Process(living(local_run.folder)[stopped])
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
    wait_until(lambda: process.status() != psutil.STATUS_STOPPED)
    assert said[-1] == f"{stopped} goes on"


def test_the_last_peers_are_left_alone(local_run: LocalRun) -> None:
    said: list[str] = []
    with rehearsal_of(local_run.folder, "stop", "kill", said=said, min_living=3) as faults:
        faults.play()
    assert said == ["nothing done: 3 peers are well, and 3 have to be"]
    assert len(living(local_run.folder)) == 3


@pytest.mark.parametrize("whose", ["other", "newer"])
def test_a_process_that_is_no_peer_is_never_touched(
    tmp_path: Path, whose: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A number from another machine, or of a peer that ended and whose number was given anew."""
    folder = tmp_path / "run"
    innocent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        at_s = time.time() - (0 if whose == "other" else 3600)
        sink = JsonLinesSink(folder / "peer-0.jsonl")
        sink(at_s, "peer-0", RunStarted("peer", "run", "", innocent.pid))
        sink.close()
        assert LocalPeers(folder).living() == {}
        assert run(["chaos", str(folder), "--every", "1s", "--kinds", "kill"]) == 3
        assert "no peer of" in capsys.readouterr().err
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()


@pytest.mark.parametrize(("began_before_s", "is_peer"), [(-60, True), (60, False)])
def test_an_open_file_proves_nothing_if_the_process_is_newer(
    tmp_path: Path, began_before_s: float, is_peer: bool
) -> None:
    sink = JsonLinesSink(tmp_path / "peer-0.jsonl")  # open here, as if this process were the peer
    told_at_s = psutil.Process().create_time() - began_before_s
    sink(told_at_s, "peer-0", RunStarted("peer", "run", "", os.getpid()))
    assert ("peer-0" in LocalPeers(tmp_path).living()) == is_peer
    sink.close()


@pytest.mark.parametrize("kind", ["cut", "slow"])
def test_what_needs_a_network_is_refused_with_the_reason(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"--kinds {kind}: links can be cut or slowed only in network"):
        parse_kinds(f"kill,{kind}")


@pytest.mark.parametrize(("text", "why"), [("kil", "unknown; choose of kill"), (" , ", "none is named")])
def test_kinds_that_make_no_sense_are_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_kinds(text)


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chaos", str(tmp_path)]) == 3
    assert "no peer told of its start" in capsys.readouterr().err
    assert run(["chaos", str(tmp_path / "nowhere")]) == 3
    assert "is no folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "it leaves nothing there"


@pytest.mark.fault
def test_ctrl_c_ends_it_and_thaws_what_it_stopped(local_run: LocalRun) -> None:
    command = [sys.executable, "-m", "atoll", "chaos", str(local_run.folder), "--every", "0.2s"]
    process = subprocess.Popen(
        [*command, "--kinds", "stop", "--seed", "5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout
        assert process.stdout.readline().startswith("seed 5: stop about every 0.2 s for 3 peers")
        assert re.match(r"peer-\d was stopped for \d+\.\d s, on purpose", process.stdout.readline())
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=SLACK_S)
    finally:
        process.kill()
    assert process.returncode == 130, rest
    assert "goes on" in rest
    states = [psutil.Process(pid).status() for pid in living(local_run.folder).values()]
    assert psutil.STATUS_STOPPED not in states
    assert len(states) == 3
