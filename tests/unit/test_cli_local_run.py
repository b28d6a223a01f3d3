"""Processes of a local run: started, watched, killed and ended, with stubs in place of the real commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from atoll.cli import children
from atoll.cli.launch import in_fresh_folder, with_peers
from atoll.cli.local_run import LocalRun, ProcessFailed, fresh_name, unfinished
from atoll.cli.signals import Stopped
from atoll.config.load import load
from atoll.config.schema import RunConfig
from atoll.dashboard.console import Nothing
from atoll.errors import ConfigError, DeadlineExceeded, LocalError
from atoll.events import EventLog, JsonLinesSink, PeerKilled, RunEnded, RunStarted

STUB = Path(__file__).parents[1] / "support" / "stub_atoll.py"
SLACK_S = 20.0  # for a busy machine

LAUNCHER = """
import sys
from pathlib import Path
from atoll.cli import children
from atoll.cli.local_run import LocalRun
from atoll.config.load import load
from atoll.dashboard.console import Nothing
children.PROGRAM = (sys.executable, sys.argv[1])
config = load(None, ["run.name=lasts-0-0", f"local.out={sys.argv[2]}", "membership.start_peers=2"], {})
with LocalRun(config, num_peers=2) as run:
    run.start()
    for _ in run.watch(Nothing()):
        pass
"""


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "PROGRAM", (sys.executable, str(STUB)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def config_of(tmp_path: Path, behaviour: str, peers: int = 2) -> RunConfig:
    return in_fresh_folder(with_peers(load(None, [f"run.name={behaviour}"], {}), peers), tmp_path)


def finish(run: LocalRun, deadline_s: float = SLACK_S) -> None:
    """Start a run and watch it to its end."""
    with run:
        run.start()
        list(run.watch(Nothing(), deadline_s=deadline_s))


def stop_when_training(run: LocalRun, signum: signal.Signals) -> None:
    with run:
        run.start()
        wait_until(running(run, "peer-0"))
        raise Stopped(signum)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + SLACK_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)


def process_ids(folder: Path) -> list[int]:
    return [json.loads(path.read_text())["pid"] for path in folder.glob("*.seen")]


def running(run: LocalRun, peer: str) -> Callable[[], bool]:
    def seen() -> bool:
        run.poll()
        return run.view.peer(peer).step > 0

    return seen


def test_a_run_to_its_end(tmp_path: Path) -> None:
    with LocalRun(config_of(tmp_path, "short"), num_peers=2, peer_settings={"local.threads": "1"}) as run:
        run.start()
        views = list(run.watch(Nothing(), deadline_s=SLACK_S))
    run.raise_failure()
    assert views
    assert {peer.state for peer in run.view.peers} == {"done"}
    assert run.view.peer("peer-1").step == 10
    times = [
        json.loads(line)["wall_time_s"] for line in (run.folder / "events.jsonl").read_text().splitlines()
    ]
    assert times == sorted(times)
    assert len(times) == len(run.seen)
    assert load(run.folder / "config.toml", [], {}).run.name == run.folder.name
    argv = json.loads((run.folder / "peer-1.seen").read_text())["argv"]
    assert "local.coordinator=127.0.0.1:1" in argv
    assert "local.threads=1" in argv


def test_the_token_is_in_no_argument_and_no_file(tmp_path: Path) -> None:
    with LocalRun(config_of(tmp_path, "short", peers=1), num_peers=1) as run:
        run.start()
        (token,) = [run._environment["ATOLL_TOKEN"].encode()]
        list(run.watch(Nothing(), deadline_s=SLACK_S))
    files = [path.read_bytes() for path in run.folder.iterdir()]
    assert len(files) > 5
    assert not [content for content in files if token in content]


def test_a_killed_peer_is_dead_told_and_not_a_failure(tmp_path: Path) -> None:
    with LocalRun(config_of(tmp_path, "lasts"), num_peers=2, narrator="demo") as run:
        run.start()
        wait_until(running(run, "peer-1"))
        pid = json.loads((run.folder / "peer-1.seen").read_text())["pid"]
        run.kill("peer-1")
        assert not psutil.pid_exists(pid)
        assert not run.is_running("peer-1")
        run.poll()
        assert [each.event for each in run.seen if each.source == "demo"] == [PeerKilled("peer-1", "SIGKILL")]
        assert run.view.peer("peer-1").state == "killed"
        run._processes["peer-0"].terminate()
        run._processes["peer-0"].wait()
        with pytest.raises(
            LocalError, match="peer-0 had ended with exit code 143 before it was to be killed"
        ):
            run.kill("peer-0")
    assert not [pid for pid in process_ids(run.folder) if psutil.pid_exists(pid)]


def test_a_peer_that_fails_before_the_run_begins_ends_it(tmp_path: Path) -> None:
    run = LocalRun(config_of(tmp_path, "fails-early"), num_peers=2)
    with pytest.raises(ProcessFailed) as caught:
        finish(run)
    assert caught.value.exit_code == 8
    assert str(caught.value) == "peer-1 ended with exit code 8: the corpus is empty; give other data.sources"
    assert not [pid for pid in process_ids(run.folder) if psutil.pid_exists(pid)]


def test_a_peer_that_is_killed_from_outside_is_the_failure(tmp_path: Path) -> None:
    with LocalRun(config_of(tmp_path, "lasts"), num_peers=2) as run:
        run.start()
        wait_until(running(run, "peer-0"))
        run._processes["peer-0"].kill()
        wait_until(lambda: not run.is_running("peer-0"))
        with pytest.raises(ProcessFailed, match="peer-0 was ended by SIGKILL") as caught:
            run.raise_failure()
    assert caught.value.exit_code == 137


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once_and_politely(tmp_path: Path, signum: signal.Signals) -> None:
    run = LocalRun(config_of(tmp_path, "lasts"), num_peers=2)
    with pytest.raises(Stopped):
        stop_when_training(run, signum)
    for name in ("peer-0", "coordinator"):
        assert (run.folder / f"{name}.log").read_text().strip() == f"asked to end by {signum.name}"
    assert not [pid for pid in process_ids(run.folder) if psutil.pid_exists(pid)]


def test_a_run_that_does_not_end_is_ended(tmp_path: Path) -> None:
    run = LocalRun(config_of(tmp_path, "lasts", peers=1), num_peers=1)
    with pytest.raises(DeadlineExceeded, match=r"did not end within 0 s; see the logs in .*lasts"):
        finish(run, deadline_s=0.3)
    assert not [pid for pid in process_ids(run.folder) if psutil.pid_exists(pid)]


def test_a_killed_launcher_leaves_no_orphans(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(STUB), str(tmp_path)])
    folder = tmp_path / "lasts-0-0"
    try:
        wait_until(lambda: len(list(folder.glob("*.seen"))) == 3)
        wait_until(lambda: all((folder / f"{name}.jsonl").exists() for name in ("peer-0", "peer-1")))
        pids = process_ids(folder)
        assert all(psutil.pid_exists(pid) for pid in pids)
    finally:
        launcher.kill()
        launcher.wait()
    wait_until(lambda: not [pid for pid in pids if _lives(pid)])


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    config = config_of(tmp_path, "short")
    (tmp_path / config.run.name).mkdir()
    with pytest.raises(LocalError, match=r"cannot use the folder .*: file exists; choose another with --out"):
        LocalRun(config, num_peers=1)


def test_names_that_are_free(tmp_path: Path) -> None:
    first = fresh_name(tmp_path, "x" * 64)
    assert len(first) <= 64
    (tmp_path / first).mkdir()
    assert fresh_name(tmp_path, "x" * 64) != first


def test_numbers_of_peers_that_make_no_run() -> None:
    with pytest.raises(ConfigError, match="a run has at least 1 peer"):
        with_peers(RunConfig(), 0)
    config = load(None, ["membership.start_peers=3", "membership.min_peers=3"], {})
    with pytest.raises(ConfigError, match=r"--peers 2 is below membership\.min_peers = 3"):
        with_peers(config, 2)


def test_a_launch_goes_on_with_the_newest_run_that_is_not_over_and_has_a_checkpoint(tmp_path: Path) -> None:
    assert unfinished(tmp_path / "absent", "run") is None
    folder = tmp_path / "run-20260131-235959"
    sink = JsonLinesSink(folder / "coordinator.jsonl")
    log = EventLog("coordinator", sink)
    log.emit(RunStarted("coordinator", "run", "", 1))
    (tmp_path / "run-20260131-000000" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run-20260131-000000" / "checkpoints" / "latest").write_text("")
    assert unfinished(tmp_path, "run") is None, "it has no checkpoint yet"
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "latest").write_text("")
    assert unfinished(tmp_path, "run") == folder.name
    assert unfinished(tmp_path, "ru") is None
    log.emit(RunEnded("stopped", 143))
    assert unfinished(tmp_path, "run") == folder.name
    log.emit(RunEnded("the run is done", 0))
    assert unfinished(tmp_path, "run") is None
    sink.close()


def test_a_run_that_goes_on_tells_no_old_news(tmp_path: Path) -> None:
    config = config_of(tmp_path, "short")
    finish(LocalRun(config, num_peers=2))
    with pytest.raises(LocalError, match="choose another"):
        LocalRun(config, num_peers=2)
    again = LocalRun(config, num_peers=2, resume=True)
    before = [seen for seen in again.poll() if not isinstance(seen.event, PeerKilled)]
    assert before == []
    finish(again)
    assert again.view.peer("peer-1").step == 10
