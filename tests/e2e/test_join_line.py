"""The join line is all that a newcomer types, before the run begins or while it goes on."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from atoll.config.load import load
from atoll.events import read_events
from atoll.train.models import build_model
from support.small_run import write_small_run
from support.swarm import environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.mark.parametrize("holder", ["coordinator", "first peer"])
def test_the_join_line_is_enough(tmp_path: Path, holder: str) -> None:
    """Whoever holds the run's settings: the RUN.toml of the coordinator, or of the first peer."""
    run_toml = write_run(tmp_path)
    asked = [str(run_toml)] if holder == "coordinator" else ["--run", "joined"]
    own = [
        "--set",
        f'local.out="{tmp_path}"',
        "--set",
        "local.threads=1",
        "--set",
        f'data.sources=["{tmp_path / "text"}"]',
    ]
    processes = []
    try:
        out = ["--out", str(tmp_path / "joined")]
        coordinator = start(tmp_path / "c.log", "coordinator", *asked, "--bind", "127.0.0.1:0", *out)
        processes.append(coordinator)
        join_line = wait_for(tmp_path / "c.log", r"join: atoll (join \S+ --run \S+)").split()
        address = join_line[1]
        first = start(
            tmp_path / "a.log",
            "train",
            str(run_toml),
            "--set",
            "local.peer=a",
            "--set",
            f"local.coordinator={address}",
        )
        processes.append(first)
        wait_for(tmp_path / "c.log", r"(round \d+ committed|a joined)")
        wait_until(lambda: versions(tmp_path / "joined" / "a.jsonl"), "a first commit")
        of_peer = wait_for(tmp_path / "a.log", r"join: atoll (join \S+ --run \S+)").split()
        assert of_peer == join_line, "every peer prints it, ready to paste"
        late = start(tmp_path / "b.log", *of_peer, *own, "--set", "local.peer=b")
        processes.append(late)
        wait_until(lambda: versions(tmp_path / "joined" / "b.jsonl"), "a commit of the newcomer")
        wait_until(  # each tells of a commit when it has applied it: the first may be a moment later
            lambda: (
                versions(tmp_path / "joined" / "a.jsonl").keys()
                & versions(tmp_path / "joined" / "b.jsonl").keys()
            ),
            "a commit of both",
        )
        assert f"join: atoll join {address} --run joined" in (tmp_path / "b.log").read_text()
        first.send_signal(signal.SIGTERM)
        assert first.wait(30) == 143
        late.send_signal(signal.SIGTERM)
        assert late.wait(30) == 143
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait(30)
    of_first, of_late = versions(tmp_path / "joined" / "a.jsonl"), versions(tmp_path / "joined" / "b.jsonl")
    assert min(of_late) > 1, "it came while the run went on"
    both = of_first.keys() & of_late.keys()
    assert both, (of_first, of_late)
    assert {v: of_first[v] for v in both} == {v: of_late[v] for v in both}, "one history"


@pytest.mark.parametrize("when", ["before the run begins", "later"])
def test_a_newcomer_needs_no_start_weights(tmp_path: Path, when: str) -> None:
    """`model.init_from` names a folder of the first peer's machine; the newcomer takes the state from that peer."""
    run_toml = write_run(tmp_path, start_peers=2 if when == "before the run begins" else 1)
    start_weights(run_toml, tmp_path / "base", seed=7)
    text = run_toml.read_text().replace("[model]", f'[model]\ninit_from = "{tmp_path / "base"}"')
    run_toml.write_text(text)
    own = ["--set", f'local.out="{tmp_path}"', "--set", "local.threads=1"]
    own += ["--set", f'data.sources=["{tmp_path / "text"}"]']
    processes = []
    try:
        out = ["--out", str(tmp_path / "joined")]
        processes.append(
            start(tmp_path / "c.log", "coordinator", str(run_toml), "--bind", "127.0.0.1:0", *out)
        )
        line = wait_for(tmp_path / "c.log", r"join: atoll (join \S+ --run \S+)").split()
        first = ["--set", "local.peer=a", "--set", f"local.coordinator={line[1]}"]
        processes.append(start(tmp_path / "a.log", "train", str(run_toml), *first))
        wait_until(lambda: told(tmp_path / "joined" / "coordinator.jsonl", "PeerJoined"), "a is a member")
        if when == "later":
            wait_until(lambda: versions(tmp_path / "joined" / "a.jsonl"), "a first commit")
        (tmp_path / "base").rename(tmp_path / "elsewhere")
        processes.append(start(tmp_path / "b.log", *line, *own, "--set", "local.peer=b"))
        wait_until(lambda: versions(tmp_path / "joined" / "b.jsonl"), "a commit of the newcomer")
    finally:
        for process in processes:
            process.kill()
            process.wait(30)
    of_first, of_late = (versions(tmp_path / "joined" / f"{peer}.jsonl") for peer in "ab")
    assert {v: of_first[v] for v in of_late if v in of_first} == of_late, "one history"
    (missed,) = told(tmp_path / "joined" / "b.jsonl", "StartWeightsMissed")
    assert missed["path"] == str(tmp_path / "base")
    (caught_up, *_) = told(tmp_path / "joined" / "b.jsonl", "CaughtUp")
    assert caught_up["snapshot_version"] is not None
    assert (caught_up["snapshot_version"] == 0) == (when == "before the run begins")


def test_a_newcomer_without_start_weights_does_not_wait_for_ever_where_nobody_has_them(
    tmp_path: Path,
) -> None:
    run_toml = write_run(tmp_path)
    text = run_toml.read_text().replace("[model]", f'[model]\ninit_from = "{tmp_path / "nowhere"}"')
    run_toml.write_text(text.replace("[membership]", "[membership]\nrelearn_s = 16"))
    log = tmp_path / "c.log"
    coordinator = start(log, "coordinator", str(run_toml), "--bind", "127.0.0.1:0", "--out", str(tmp_path))
    try:
        line = wait_for(log, r"join: atoll (join \S+ --run \S+)").split()
        own = ["--set", f'local.out="{tmp_path}"', "--set", f'data.sources=["{tmp_path / "text"}"]']
        late = start(tmp_path / "b.log", *line, *own)
        assert late.wait(100) == 4, (tmp_path / "b.log").read_text()
    finally:
        coordinator.kill()
        coordinator.wait(30)
    assert "no peer of the run was there to give its state for 8 s" in " ".join(
        (tmp_path / "b.log").read_text().split()
    )


def test_what_belongs_to_the_run_is_not_the_newcomers_to_set(tmp_path: Path) -> None:
    log = tmp_path / "c.log"
    coordinator = start(
        log,
        "coordinator",
        str(write_run(tmp_path)),
        "--bind",
        "127.0.0.1:0",
        "--out",
        str(tmp_path / "joined"),
    )
    try:
        line = wait_for(log, r"join: atoll (join \S+ --run \S+)").split()
        done = subprocess.run(
            [sys.executable, "-m", "atoll", *line, "--set", "inner.lr=0.1"],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        coordinator.kill()
        coordinator.wait(30)
    assert done.returncode == 2, done.stderr
    assert "--set inner.lr=0.1: this belongs to the run" in done.stderr


def start_weights(run_toml: Path, folder: Path, *, seed: int) -> None:
    """Weights of the run's model, as another tool would have saved them."""
    model = build_model(load(run_toml, [f"run.seed={seed}"]))
    folder.mkdir()
    save_file({name: each.detach() for name, each in model.named_parameters()}, folder / "model.safetensors")


def told(path: Path, kind: str) -> list[dict[str, Any]]:
    lines = [line.event for _, line, _ in read_events(path)] if path.exists() else []
    return [event for event in lines if event["type"] == kind]


def write_run(folder: Path, start_peers: int = 1) -> Path:
    more = {"membership.start_peers": start_peers, "local.out": str(folder)}
    return write_small_run(folder, "joined", more)


def start(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "atoll", *arguments],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def wait_for(log: Path, pattern: str) -> str:
    """The first group of the pattern, once the log has it."""
    wait_until(lambda: re.search(pattern, log.read_text()), f"{pattern} in {log.name}")
    found = re.search(pattern, log.read_text())
    assert found is not None
    return found.group(1)


def wait_until(holds: Any, what: str, within_s: float = 90.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, f"{what}: not within {within_s} s"
        time.sleep(0.05)


def versions(events: Path) -> dict[int, str]:
    """The digest of every version that this peer committed."""
    if not events.exists():
        return {}
    lines = [line.event for _, line, _ in read_events(events)]
    return {event["version"]: event["digest"] for event in lines if event["type"] == "RoundApplied"}
