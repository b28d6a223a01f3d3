"""A whole run on this machine: a coordinator and its peers as processes, and the folder they report in."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from atoll.cli import children
from atoll.config.dump import write_resolved
from atoll.config.environment import for_child, for_rank
from atoll.config.schema import RunConfig
from atoll.dashboard.console import Display
from atoll.dashboard.tail import EventTail, merge_events
from atoll.dashboard.view import Seen, View, fold
from atoll.errors import AtollError, DeadlineExceeded, LocalError
from atoll.events import (
    CoordinatorListening,
    EventLog,
    FaultPlayed,
    JsonLinesSink,
    PeerKilled,
    RunEnded,
    RunStarted,
    read_events,
)
from atoll.membership.auth import new_token

COORDINATOR = "coordinator"
CHECKPOINTS = "checkpoints"
START_S = 30.0  # for the coordinator to listen; it imports no torch
POLL_S = 0.1
GRACE_S = 10.0  # for a polite end, before SIGKILL
AFTER_PEERS_S = 10.0  # for the coordinator to end by itself once all peers have


class ProcessFailed(AtollError):
    """A process of the run ended badly; this ends the command with its exit code."""

    def __init__(self, name: str, code: int, log: Path) -> None:
        how = (
            f"was ended by {signal.Signals(code - 128).name}"
            if code > 128
            else f"ended with exit code {code}"
        )
        words = children.last_words(log) if code < 128 else []
        super().__init__(f"{name} {how}: " + ("; ".join(words) or f"see {log}"))
        self.exit_code = code or 1


class LocalRun:
    """Starts, watches, kills and stops the processes of one run. Leaving the `with` block ends them all.

    The folder holds the resolved `config.toml` and, per process, its events (`NAME.jsonl`) and output
    (`NAME.log`); at the end also `events.jsonl`, the events of all. One thread: the caller's, which must be
    the main thread.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        num_peers: int,
        peer_settings: Mapping[str, str] | None = None,
        narrator: str = "launch",
        resume: bool = False,
        ranks: Sequence[int] = (),
    ) -> None:
        """The folder is `config.local.out`/`config.run.name`. It must not exist yet, unless the run that is in it is to
        go on (`resume`). Raises LocalError.

        Peers are `peer-0`, `peer-1`, ...; `peer_settings` are `--set` values for all of them. `ranks` are how many
        ranks each has (default: one): a process each, `peer-0` and then `peer-0.1`, `peer-0.2`, ...
        """
        self.folder = Path(config.local.out) / config.run.name
        self.peers = tuple(f"peer-{index}" for index in range(num_peers))
        self._ranks = dict(zip(self.peers, ranks or [1] * num_peers, strict=True))
        self.view = View()
        self.seen: list[Seen] = []
        self._ended_here: set[str] = set()
        self._peer_settings = dict(peer_settings or {})
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = for_child(new_token())
        self._tail = EventTail(self.folder)
        self._config_path = self.folder / "config.toml"
        try:
            self.folder.mkdir(parents=True, exist_ok=resume)
            if resume:
                self._tail.read()  # what was told before is no news
            write_resolved(config, self._config_path)
            self._sink = JsonLinesSink(self.folder / f"{narrator}.jsonl")
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise LocalError(
                f"cannot use the folder {self.folder}: {reason}; choose another with --out"
            ) from None
        self._meeting = Path(tempfile.mkdtemp(prefix="atoll-ranks-"))
        self._events = EventLog(narrator, self._sink)

    # ---- beginning and end -----------------------------------------------------------------------

    def start(self) -> None:
        """Start the coordinator, then the peers. Raises ProcessFailed or DeadlineExceeded if that fails."""
        self._spawn(COORDINATOR, ["--bind", "127.0.0.1:0"])
        address = self._coordinator_address()
        for peer in self.peers:
            settings = {**self._peer_settings, "local.coordinator": address, "local.peer": peer}
            arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
            for rank, name in enumerate(self.processes_of(peer)):
                self._spawn(name, arguments, self._of_rank(peer, rank))

    def processes_of(self, peer: str) -> list[str]:
        """The names of a peer's processes, by rank."""
        return [f"{peer}.{rank}" if rank else peer for rank in range(self._ranks[peer])]

    def stop(self, signum: signal.Signals = signal.SIGTERM) -> None:
        """End all processes: politely within 10 s, then by force."""
        children.stop_all(self._processes.values(), signum, GRACE_S)
        self.poll()

    def __enter__(self) -> LocalRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(getattr(error, "signum", signal.SIGTERM))
        self._sink.close()
        shutil.rmtree(self._meeting, ignore_errors=True)
        merge_events(self.folder)

    # ---- while it runs ---------------------------------------------------------------------------

    def watch(self, display: Display, *, deadline_s: float = float("inf")) -> Iterator[View]:
        """Show the run until all its processes have ended; yields the view about ten times a second.

        Raises ProcessFailed if a process fails before the run began, or the coordinator does, and
        DeadlineExceeded after `deadline_s` seconds.
        """
        began_s = time.monotonic()
        peers_ended_s: float | None = None
        while running := self._running():
            self._show(display)
            self._check()
            now_s = time.monotonic()
            if now_s - began_s > deadline_s:
                raise DeadlineExceeded(
                    f"the run did not end within {deadline_s:.0f} s; see the logs in {self.folder}"
                )
            if running == {COORDINATOR}:
                peers_ended_s = peers_ended_s or now_s
                if now_s - peers_ended_s > AFTER_PEERS_S:
                    self._ended_here.add(COORDINATOR)
                    children.stop_all([self._processes[COORDINATOR]], signal.SIGTERM, GRACE_S)
            yield self.view
            time.sleep(POLL_S)
        self._show(display)

    def poll(self) -> Sequence[Seen]:
        """The events since the last call, folded into `view` and kept in `seen`."""
        new = self._tail.read()
        for each in new:
            self.view = fold(self.view, each)
            if isinstance(each.event, PeerKilled) or (
                isinstance(each.event, FaultPlayed) and each.event.kind == "leave"
            ):
                name = each.event.peer  # a rehearsal's: not a failure of the run
                self._ended_here.update(self.processes_of(name) if name in self._ranks else [name])
        self.seen += new
        return new

    def kill(self, peer: str) -> None:
        """SIGKILL a peer, see that it is dead, and log it. LocalError if it was dead or will not die."""
        process = self._processes[peer]
        process.kill()
        try:
            code = process.wait(5.0)
        except subprocess.TimeoutExpired:
            raise LocalError(f"{peer} (pid {process.pid}) lives on 5 s after SIGKILL") from None
        if code != -signal.SIGKILL:
            raise LocalError(f"{peer} had ended with exit code {code} before it was to be killed")
        self._ended_here.update(self.processes_of(peer))  # its other ranks end by themselves
        self._events.emit(PeerKilled(peer=peer, signal="SIGKILL"))

    def is_running(self, name: str) -> bool:
        return self._processes[name].poll() is None

    def raise_failure(self) -> None:
        """Raise ProcessFailed for the worst (highest) exit code of those not ended by this class."""
        name, code = max(self._codes(), key=lambda each: each[1], default=("", 0))
        if code:
            raise ProcessFailed(name, code, self._log(name))

    # ---- details ---------------------------------------------------------------------------------

    def _spawn(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        command = "coordinator" if name == COORDINATOR else "train"
        self._processes[name] = children.start(
            [command, str(self._config_path), *arguments],
            environment=environment or self._environment,
            log=self._log(name),
        )

    def _of_rank(self, peer: str, rank: int) -> Mapping[str, str]:
        if self._ranks[peer] == 1:
            return self._environment
        return for_rank(rank, self._ranks[peer], self._meeting / peer, self._environment)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _running(self) -> set[str]:
        return {name for name in self._processes if self.is_running(name)}

    def _codes(self) -> list[tuple[str, int]]:
        judged = [
            (name, process) for name, process in self._processes.items() if name not in self._ended_here
        ]
        return [(name, children.exit_code(process) or 0) for name, process in judged]

    def _show(self, display: Display) -> None:
        new = self.poll()
        display.show(self.view, new)

    def _coordinator_address(self) -> str:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            for each in self.poll():
                if isinstance(each.event, CoordinatorListening):
                    return each.event.address
            self._check()
            time.sleep(POLL_S / 2)
        log = self._log(COORDINATOR)
        raise DeadlineExceeded(f"the coordinator did not listen within {START_S:.0f} s; see {log}")

    def _check(self) -> None:
        """A run that loses a process before its first step cannot begin; without coordinator none goes on."""
        for name, code in self._codes():
            if code and (name == COORDINATOR or self.view.started_at_s is None):
                raise ProcessFailed(name, code, self._log(name))


def unfinished(parent: Path, name: str) -> str | None:
    """The newest run in `parent` that was launched as `name`, if it has a checkpoint and is not over; else None."""
    pattern = re.compile(re.escape(name[:40]) + r"-\d{8}-\d{6}(-\d+)?")
    folders = [each for each in parent.iterdir() if pattern.fullmatch(each.name)] if parent.is_dir() else []
    newest = max(folders, key=lambda each: each.name, default=None)
    if newest is None or not (newest / CHECKPOINTS / "latest").exists() or _is_over(newest):
        return None
    return newest.name


def _is_over(folder: Path) -> bool:
    """Whether the run's coordinator ended well."""
    path = folder / f"{COORDINATOR}.jsonl"
    if not path.exists():
        return False
    told = [event for _, _, event in read_events(path) if isinstance(event, RunStarted | RunEnded)]
    return bool(told) and isinstance(told[-1], RunEnded) and told[-1].exit_code == 0


def fresh_name(parent: Path, name: str) -> str:
    """A run name whose folder is free: `NAME-20260131-235959`, numbered where two start in one second."""
    stem = f"{name[:40]}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
        if not (parent / (stem + suffix)).exists():
            return stem + suffix
    raise LocalError(f"no free folder like {stem} in {parent}; choose another with --out")


def threads_per_peer(num_peers: int) -> int:
    """An equal share of the cores that this process may use, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // num_peers)
