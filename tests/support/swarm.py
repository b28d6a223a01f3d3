"""Real processes for tests: a coordinator and peers on loopback, watched, bounded in time, and always cleaned up."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from atoll.config.environment import for_rank
from atoll.events import read_events
from atoll.membership.operator import Status
from atoll.membership.operator_link import ask_status
from atoll.recovery.folder import RAM, remove_stale
from support.nursery import Child, Nursery
from support.tied import tied

TOKEN = "a-token-for-tests-0123456789abcdef"
QUADRATIC = Path(__file__).with_name("quadratic_peer.py")

# Tests wait as long as the hard cases say they must be able to.
FAST = {
    "heartbeat_s": 0.5,
    "dead_s": 5.0,
    "attempt_s": 8.0,
    "vote_s": 8.0,
    "connect_s": 10.0,
    "ready_wait_s": 30.0,
    "coordinator_lost_s": 20.0,
    "quorum_wait_s": 90.0,
}


@dataclass
class Peer:
    """One peer process and the files it writes."""

    name: str
    process: Child
    results: Path
    marker: Path
    log: Path
    siblings: list[Child] = field(default_factory=list)
    """The processes of its further ranks."""

    @property
    def processes(self) -> list[Child]:
        """All of its ranks."""
        return [self.process, *self.siblings]

    def rounds(self) -> list[dict[str, Any]]:
        if not self.results.exists():
            return []
        return [json.loads(line) for line in self.results.read_text().splitlines()]

    def thetas(self) -> list[float]:
        return [row["theta"] for row in self.rounds()]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def output(self) -> str:
        return self.log.read_text(errors="replace")


class Swarm:
    """A coordinator and its peers. Use in a `with` statement: leaving it ends every process it started."""

    def __init__(
        self,
        folder: Path,
        *,
        start_peers: int,
        run: str = "quadratic",
        save_rounds: int = 0,
        progress_timeout_s: float | None = None,
        **membership: Any,
    ) -> None:
        """`save_rounds`: every so many versions are checkpoints, for peers with --checkpoints; 0: none are. Without
        `progress_timeout_s` the default holds."""
        self.folder, self.run = folder, run
        self.save_rounds = save_rounds
        self.progress_timeout_s = progress_timeout_s
        self.peers: dict[str, Peer] = {}
        self._read: dict[str, tuple[int, list[dict[str, Any]]]] = {}
        relearn_s = max(30.0, membership.get("dead_s", 0.0))
        self.settings = {**FAST, "relearn_s": relearn_s, "start_peers": start_peers, **membership}
        self.journal = folder / "journal"
        self.address = self.first_address()
        self.coordinator = self._start_coordinator()

    def first_address(self) -> str:
        """Where the coordinator is to listen."""
        return "127.0.0.1:0"

    def placed(self, command: list[str]) -> list[str]:
        """The coordinator's command, as it is run where it is to live."""
        return command

    # ---- starting --------------------------------------------------------------------------------------------------

    def _start_coordinator(self) -> subprocess.Popen[bytes]:
        before = len(self.events("CoordinatorListening"))
        process = self.spawn_coordinator()

        def listens() -> bool:
            if len(self.events("CoordinatorListening")) > before:
                return True
            assert process.poll() is None, f"the coordinator ended with {process.returncode}\n{self.logs()}"
            return False

        self.wait(listens, within_s=60, what="the coordinator")
        self.address = self.events("CoordinatorListening")[-1]["address"]
        return process

    def coordinator_listens(self) -> bool:
        """Whether the process that was started last lives and has said that it listens."""
        told = [e for e in self.events() if e["type"] in ("RunStarted", "CoordinatorListening")]
        started = [event["pid"] for event in told if event["type"] == "RunStarted"]
        listens = bool(told) and told[-1]["type"] == "CoordinatorListening"
        return listens and started[-1] == self.coordinator.pid and self.coordinator.poll() is None

    def start_ended_coordinator(self) -> None:
        """Start it again where it will have nothing to do: it ends by itself."""
        self.spawn_coordinator()

    def spawn_coordinator(self) -> subprocess.Popen[bytes]:
        """Start its process, and do not wait until it listens."""
        saves = [f"--set=checkpoint.every_rounds={self.save_rounds}", "--set=checkpoint.every_s=0"]
        sets = [f"--set=membership.{name}={json.dumps(value)}" for name, value in self.settings.items()]
        if self.progress_timeout_s is not None:
            sets.append(f"--set=net.progress_timeout_s={self.progress_timeout_s:g}")
        command = [sys.executable, "-m", "atoll", "coordinator", "--run", self.run, "--bind", self.address]
        command += [
            "--journal",
            str(self.journal),
            "--set",
            f"local.out={json.dumps(str(self.folder))}",
            *sets,
            *saves,
        ]
        log = (self.folder / "coordinator.log").open("ab")
        process = subprocess.Popen(
            tied(self.placed(command)), env=environment(), stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        log.close()
        self.coordinator = process
        return process

    def kill_coordinator(self) -> None:
        self.coordinator.send_signal(signal.SIGKILL)
        self.coordinator.wait(timeout=10)

    def kill_all(self) -> None:
        """Every process of the run at once: the coordinator and all peers."""
        self.coordinator.send_signal(signal.SIGKILL)
        for peer in self.peers.values():
            for process in peer.processes:
                process.send_signal(signal.SIGKILL)
        self.coordinator.wait(timeout=10)
        for peer in self.peers.values():
            for process in peer.processes:
                process.wait(timeout=10)

    def restart_coordinator(self) -> None:
        """Start it again on the same address and journal; the old one must have ended."""
        assert self.coordinator.poll() is not None
        self._start_coordinator()

    def order(self, *arguments: str, within_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run `atoll COMMAND ADDRESS ...` against this run's coordinator, and wait for it."""
        command, *rest = arguments
        return subprocess.run(
            [sys.executable, "-m", "atoll", command, self.address, *rest],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=within_s,
            stdin=subprocess.DEVNULL,
        )

    def status(self) -> Status:
        """How the run stands, asked as `atoll status` does, without a process for it."""
        found = ask_status(self.address, TOKEN.encode())
        assert isinstance(found, Status)
        return found

    def quadratic(self, name: str, center: float, *arguments: object, ranks: int = 1) -> Peer:
        """Start a peer of the quadratic, a process for each of its ranks. Further arguments are those of
        quadratic_peer.py."""
        results, marker = self.folder / f"{name}.results", self.folder / f"{name}.marker"
        log_path = self.folder / f"{name}.log"
        command = ["--address", self.address, "--peer", name, "--center", str(center)]
        command += ["--results", str(results), "--marker", str(marker), "--out", str(self.folder)]
        command += map(str, arguments)
        meeting = self.folder / f"{name}-{time.monotonic_ns()}.ranks"
        started = [
            nursery().start(
                QUADRATIC,
                command,
                log_path,
                for_rank(rank, ranks, meeting, {}) if ranks > 1 else {},
            )
            for rank in range(ranks)
        ]
        self.peers[name] = Peer(name, started[0], results, marker, log_path, started[1:])
        return self.peers[name]

    # ---- watching --------------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], object], *, within_s: float, what: str) -> None:
        """Wait until the condition holds; fail with all logs if it does not within `within_s`."""
        deadline_s = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise AssertionError(f"{what}: not within {within_s} s\n{self.logs()}")
            time.sleep(0.01)

    def wait_for_marker(self, peer: Peer, within_s: float = 90) -> None:
        """The fault's place was reached."""
        self.wait(peer.marker.exists, within_s=within_s, what=f"{peer.name} at its marker")

    def finish(self, *names: str, within_s: float = 90) -> dict[str, int]:
        """Exit codes of the named peers (default: all), once they have ended."""
        chosen = [self.peers[name] for name in names or self.peers]
        self.wait(
            lambda: all(each.poll() is not None for p in chosen for each in p.processes),
            within_s=within_s,
            what="the end of all peers",
        )
        return {p.name: p.process.returncode for p in chosen}

    def finish_well(self, *names: str, within_s: float = 90) -> None:
        self.finish(*names, within_s=within_s)
        codes = {n: [each.returncode for each in self.peers[n].processes] for n in names or self.peers}
        assert {code for each in codes.values() for code in each} == {0}, f"{codes}\n{self.logs()}"

    def events(self, kind: str | None = None, source: str = "coordinator") -> list[dict[str, Any]]:
        path = self._events_file(source)
        if not path.exists():
            return []
        end, found = self._read.get(source, (0, []))
        new = list(read_events(path, end))  # tests ask again and again: only what is new is read
        found += [line.event for _, line, _ in new]
        self._read[source] = (new[-1][0] if new else end, found)
        return [event for event in found if kind in (None, event["type"])]

    def when(self, kind: str, source: str = "coordinator") -> float:
        """When the first event of this kind was written, in Unix seconds."""
        told = (line for _, line, _ in read_events(self._events_file(source)))
        return next(line.wall_time_s for line in told if line.event["type"] == kind)

    def _events_file(self, source: str) -> Path:
        return self.folder / self.run / f"{source}.jsonl"

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}" for path in self._logs()
        )

    def _logs(self) -> Iterator[Path]:
        yield from sorted(self.folder.glob("*.log"))

    def digests_by_version(self) -> dict[int, set[str]]:
        """Every digest that any peer recorded for a version: one each, or the run has forked."""
        found: dict[int, set[str]] = {}
        for peer in self.peers.values():
            for row in peer.rounds():
                found.setdefault(row["version"], set()).add(row["digest"])
        return found

    def assert_one_history(self) -> None:
        digests = self.digests_by_version()
        assert digests, f"no round was recorded\n{self.logs()}"
        assert all(len(found) == 1 for found in digests.values()), digests

    # ---- ending ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Swarm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in [self.coordinator, *(each for p in self.peers.values() for each in p.processes)]:
            if process.poll() is None:
                process.kill()
            process.wait(timeout=10)
        remove_stale(RAM)  # of peers that were killed before they had a sidecar to do it


@functools.cache
def nursery() -> Nursery:
    """The session's nursery; its children end with it."""
    made = Nursery(environment())
    atexit.register(made.close)
    return made


def environment() -> dict[str, str]:
    """A child's environment: this one, with the token and one thread, without Atoll's other variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    return {**kept, "ATOLL_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def close_to(found: Sequence[float], expected: Sequence[float], tolerance: float = 1e-5) -> bool:
    return len(found) == len(expected) and all(
        abs(a - b) <= tolerance for a, b in zip(found, expected, strict=True)
    )
