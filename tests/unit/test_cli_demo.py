"""`atoll demo`, for real but short: what it prints and leaves, and that nothing of it outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import psutil
import pytest
from safetensors import safe_open

from atoll.cli.demo_run import demo_config
from atoll.config.load import load
from atoll.dashboard.tail import EventTail
from atoll.events import PeerKilled, RoundApplied, RunEnded

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
KEYS = {
    "val_loss_before",
    "val_loss_after",
    "tokens",
    "rounds",
    "peers_lost",
    "bytes_sent_per_peer",
    "bytes_data_parallel",
    "compute_utilisation",
    "digests_equal",
    "saves_done",
    "saves_skipped",
    "saves_failed",
    "saved_version",
    "run_dir",
}


def start_demo(folder: Path, *options: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "atoll", "demo", "--out", str(folder), *options]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
    )


def test_three_peers_one_killed(tmp_path: Path) -> None:
    demo = start_demo(tmp_path, "--seconds", "8", "--json")
    out, err = demo.communicate()
    assert (demo.returncode, err) == (0, "")
    (line,) = out.splitlines()
    report = json.loads(line)
    assert set(report) == KEYS
    assert report["peers_lost"] == ["peer-2"]
    assert report["digests_equal"] is True
    assert report["val_loss_after"] < report["val_loss_before"]
    assert 0 < report["bytes_sent_per_peer"] < report["bytes_data_parallel"]
    assert 0 < report["compute_utilisation"] < 1
    _check_folder(Path(report["run_dir"]), report)


def _check_folder(folder: Path, report: dict[str, int]) -> None:
    assert load(folder / "config.toml", [], {}).run.name == folder.name
    assert ET.parse(folder / "loss.svg").getroot().tag.endswith("svg")
    with safe_open(folder / "model.safetensors", framework="np") as file:
        assert "model.embed_tokens.weight" in file.keys()  # noqa: SIM118
    seen = EventTail(folder).read()
    assert len((folder / "events.jsonl").read_text().splitlines()) == len(seen)
    killed = next(index for index, each in enumerate(seen) if isinstance(each.event, PeerKilled))
    after = {each.source for each in seen[killed:] if isinstance(each.event, RoundApplied)}
    assert after == {"peer-0", "peer-1"}
    assert {each.event.exit_code for each in seen if isinstance(each.event, RunEnded)} == {0}
    rounds = {each.event.version for each in seen if isinstance(each.event, RoundApplied)}
    assert report["rounds"] == len(rounds)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_nothing_outlives_the_demo(tmp_path: Path, signum: signal.Signals, code: int) -> None:
    demo = start_demo(tmp_path, "--seconds", "100", "--peers", "1")
    try:
        children = _two_children(demo.pid)
        demo.send_signal(signum)
        _, err = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert demo.returncode == code
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


def _two_children(pid: int) -> list[psutil.Process]:
    """The coordinator and the peer, once both have been started."""
    deadline_s = time.monotonic() + 60
    while len(children := psutil.Process(pid).children(recursive=True)) < 2:
        assert time.monotonic() < deadline_s, "the demo started no processes"
        time.sleep(0.05)
    return children


@pytest.mark.parametrize("seconds", [1, 10, 20, 60, 600])
def test_the_run_fits_its_time(seconds: float) -> None:
    config = demo_config("demo", 3, seconds, "runs")
    assert isinstance(config.outer.inner_steps, tuple)
    tight, long = config.outer.inner_steps
    assert config.run.max_seconds == seconds
    assert tight.until % tight.inner_steps == 0
    assert tight.inner_steps < long.inner_steps <= 30
    assert config.outer.momentum <= 0.6  # few rounds remain
