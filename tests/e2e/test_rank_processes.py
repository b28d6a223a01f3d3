"""Peers of several ranks as their user starts them: `atoll launch --ranks`, and torchrun beside a peer of one rank."""

from __future__ import annotations

import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from atoll.dashboard.tail import EventTail
from atoll.dashboard.view import Seen
from atoll.events import (
    AnchorEvaluated,
    CaughtUp,
    CheckpointSaved,
    PeerLeft,
    Resumed,
    RoundApplied,
    RunEnded,
    TrainingStep,
)
from support.swarm import environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

RUN = """
[run]
name = "several"
seed = 3
steps = {steps}

[model]
dim = 32
num_layers = 2
num_heads = 4
num_kv_heads = 2
ffn_dim = 88
max_seq_len = 32

[data]
sources = ["{text}"]
seq_len = 32
slots = 16
val_fraction = 0.2

[inner]
lr = 1e-2
batch_size = 6
warmup_steps = 4

[outer]
inner_steps = {inner_steps}

[checkpoint]
every_rounds = 1

[eval]
every_rounds = 2

[membership]
start_peers = {peers}
min_peers = {peers}

[local]
out = "{out}"
threads = 1
log_every = 1
"""
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "--")
"""What follows "--" is ours. Without it torchrun takes our --run for a --run-path of its own that is cut short."""


def write_run(folder: Path, *, steps: int, peers: int, inner_steps: int = 3) -> Path:
    text = folder / "text"
    text.mkdir()
    for number in range(40):
        lines = [f"line {i} of document {number}: {i * number}" for i in range(60)]
        (text / f"{number}.txt").write_text("\n".join(lines))
    path = folder / "run.toml"
    path.write_text(
        RUN.format(text=text, steps=steps, inner_steps=inner_steps, peers=peers, out=folder / "runs")
    )
    return path


class Started:
    """A command, and what it says."""

    def __init__(self, log: Path, *words: object, told: Mapping[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *map(str, words)],
                env={**environment(), **(told or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, within_s: float = 120.0) -> int:
        return self.process.wait(within_s)

    def until(self, holds: Callable[[], object], what: str, within_s: float = 90.0) -> None:
        deadline_s = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < deadline_s, f"{what}: not within {within_s} s\n{self.said()}"
            assert self.process.poll() is None, f"{what}: it has ended\n{self.said()}"
            time.sleep(0.02)

    def kill(self) -> None:
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()
        self.process.wait(30)


@contextmanager
def started(folder: Path) -> Iterator[Callable[..., Started]]:
    """Starts commands; what is left of them at the end is killed."""
    all_: list[Started] = []

    def start(name: str, *words: object) -> Started:
        all_.append(Started(folder / f"{name}.log", *words))
        return all_[-1]

    try:
        yield start
    finally:
        for each in all_:
            each.kill()


def of(seen: list[Seen], kind: type, source: str | None = None) -> list:
    return [each.event for each in seen if isinstance(each.event, kind) and source in (None, each.source)]


def digests(seen: list[Seen]) -> dict[int, dict[str, str]]:
    """By version, then by peer."""
    found: dict[int, dict[str, str]] = {}
    for each in seen:
        if isinstance(each.event, RoundApplied):
            found.setdefault(each.event.version, {})[each.source] = each.event.digest
    return found


def assert_one_history(seen: list[Seen], peers: int) -> None:
    found = digests(seen)
    assert all(len(set(each.values())) == 1 for each in found.values()), found
    assert max(len(each) for each in found.values()) == peers, found


def test_peers_of_one_two_and_three_ranks_train_and_go_on_with_other_numbers(tmp_path: Path) -> None:
    run_toml = write_run(tmp_path, steps=200, peers=3, inner_steps=20)  # long enough to save each
    command = ["atoll", "launch", run_toml, "--peers", 3, "--ranks"]
    with started(tmp_path) as start:
        first = start("first", *command, "1,2,3")
        runs = tmp_path / "runs"

        def saved() -> bool:
            seen = [each for path in runs.glob("*") for each in EventTail(path).read()]
            return len({e.source for e in seen if isinstance(e.event, CheckpointSaved)}) == 3

        first.until(saved, "each peer has saved a version")
        first.process.send_signal(signal.SIGTERM)
        assert first.wait() == 143, first.said()
        (folder,) = runs.iterdir()
        before = EventTail(folder).read()
        assert_one_history(before, 3)

        second = start("second", *command, "3,1,2")
        assert second.wait() == 0, second.said()
    (folder,) = runs.iterdir()
    seen = EventTail(folder).read()[len(before) :]
    assert_one_history(seen, 3)
    assert max(digests(seen)) >= 10, "all 200 steps, 20 a round"
    for peer, were, are in (("peer-0", "1 rank", 3), ("peer-1", "2 ranks", 1), ("peer-2", "3 ranks", 2)):
        (resumed,) = of(seen, Resumed, peer)
        assert resumed.version >= 1
        assert resumed.own_part
        assert any(
            f"it was saved by {were} and this peer has {are}: its inner optimizer's state is cut anew" in each
            for each in resumed.remarks
        ), resumed.remarks
        steps = of(seen, TrainingStep, peer)
        assert steps
        assert all(math.isfinite(each.loss) and not each.skipped for each in steps)
        assert [each.exit_code for each in of(seen, RunEnded, peer)] == [0]
    evaluated = [each.val_loss for each in of(before, AnchorEvaluated) + of(seen, AnchorEvaluated)]
    assert evaluated[0] > 5, "of 256 bytes it knows nothing"
    assert evaluated[-1] < evaluated[0] - 1
    logs = [path.name for path in folder.glob("peer-*.log")]
    assert {"peer-1.1.log", "peer-2.1.log", "peer-2.2.log"} <= set(logs), "each rank was a process"


def test_torchrun_starts_a_peer_of_two_ranks(tmp_path: Path) -> None:
    run_toml = write_run(tmp_path, steps=12, peers=2)
    with started(tmp_path) as start:
        coordinator, address = begin(start, run_toml)
        a = start("a", "atoll", "train", run_toml, *named("a", address))
        b = start("b", *TORCHRUN, "atoll", "train", run_toml, *named("b", address))
        assert (a.wait(), b.wait()) == (0, 0), a.said() + b.said()
        assert coordinator.wait() == 0
    seen = EventTail(tmp_path / "runs" / "several").read()
    assert_one_history(seen, 2)
    assert len(digests(seen)) == 4
    assert [each.exit_code for peer in "ab" for each in of(seen, RunEnded, peer)] == [0, 0]


def test_torchrun_joins_late_and_is_stopped(tmp_path: Path) -> None:
    run_toml = write_run(tmp_path, steps=1_000_000, peers=1)
    folder = tmp_path / "runs" / "several"
    with started(tmp_path) as start:
        _, address = begin(start, run_toml)
        a = start("a", "atoll", "train", run_toml, *named("a", address))
        a.until(lambda: digests(EventTail(folder).read()), "a first commit")
        own = ["--set", f'local.out="{tmp_path / "runs"}"', "--set", "local.threads=1"]
        b = start(
            "b", *TORCHRUN, "atoll", "join", address, "--run", "several", *named("b", address)[:2], *own
        )

        def both() -> bool:
            return sum(len(each) == 2 for each in digests(EventTail(folder).read()).values()) >= 2

        b.until(both, "two rounds of both")
        ranks = psutil.Process(b.process.pid).children(recursive=True)
        assert len([each for each in ranks if "join" in each.cmdline()]) == 2, "the fault hits two ranks"
        b.process.send_signal(signal.SIGTERM)
        b.wait(60)
        _, alive = psutil.wait_procs(ranks, timeout=10)
        assert not alive, "whatever torchrun started is gone"
        at = max(digests(EventTail(folder).read()))
        a.until(lambda: max(digests(EventTail(folder).read())) > at + 1, "the other goes on")
    seen = EventTail(folder).read()
    assert_one_history(seen, 2)
    (caught_up, *_) = of(seen, CaughtUp, "b")
    assert caught_up.version >= 1
    (left,) = of(seen, PeerLeft, "coordinator")  # it said goodbye, whichever of its ranks heard first
    assert (left.peer, "stopped by SIGTERM" in left.reason) == ("b", True), left
    # torchrun's own ends so; a rank's would not.
    assert b.said().count("Traceback") == b.said().count("SignalException: Process"), b.said()


def begin(start: Callable[..., Started], run_toml: Path) -> tuple[Started, str]:
    """A coordinator, and its address."""
    coordinator = start("c", "atoll", "coordinator", run_toml, "--bind", "127.0.0.1:0")
    pattern = r"join: atoll join (\S+) --run"
    coordinator.until(lambda: re.search(pattern, coordinator.said()), "it listens")
    found = re.search(pattern, coordinator.said())
    assert found is not None
    return coordinator, found[1]


def named(peer: str, address: str) -> list[str]:
    return ["--set", f"local.peer={peer}", "--set", f"local.coordinator={address}"]


@pytest.mark.parametrize(
    ("words", "told", "said"),
    [
        ("launch RUN --peers 3 --ranks 1,2", {}, "--ranks 1,2 is for 2 peers, --peers 3; give as many"),
        ("launch RUN --peers 1 --ranks 0", {}, "--ranks 0: give one number of ranks"),
        (
            "launch RUN --peers 2 --ranks 1,4",
            {},
            "inner.batch_size = 6 is not a multiple of this peer's 4 ranks",
        ),
        ("train RUN", {"RANK": "0"}, "WORLD_SIZE is not set, but a launcher's other variables are"),
        ("train RUN", {"RANK": "2", "WORLD_SIZE": "2"}, "RANK = 2 does not fit WORLD_SIZE = 2"),
        ("train RUN", {"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE = 'two' is not a whole number"),
        ("train RUN", {"RANK": "0", "WORLD_SIZE": "2"}, "neither MASTER_ADDR nor ATOLL_RENDEZVOUS says"),
    ],
    ids=["launch", "zero", "batch", "world", "rank", "number", "meeting"],
)
def test_a_mistake_is_one_line(tmp_path: Path, words: str, told: dict[str, str], said: str) -> None:
    run_toml = write_run(tmp_path, steps=6, peers=1)
    done = subprocess.run(
        [sys.executable, "-m", "atoll", *words.replace("RUN", str(run_toml)).split()],
        env={**environment(), **told},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("atoll: error: ")
    assert said in line
