"""A dress rehearsal: one random fault after the other for the peers of a run on this machine."""

from __future__ import annotations

import heapq
import itertools
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from atoll.cli import children
from atoll.cli.local_peers import LocalPeer, LocalPeers
from atoll.config import environment
from atoll.dashboard.words import sentence
from atoll.errors import LocalError
from atoll.events import Event, EventLog, FaultPlayed, JsonLinesSink, PeerKilled

KINDS = ("kill", "stop", "join", "leave")
NAME = "chaos"
GRACE_S = 5.0  # for the peers that were started here, to say goodbye


@dataclass(frozen=True)
class Launch:
    """How a peer was started, so that it can be started again."""

    command: tuple[str, ...]
    folder: str
    environment: Mapping[str, str]

    @classmethod
    def of(cls, process: psutil.Process) -> Launch:
        return cls(tuple(process.cmdline()), process.cwd(), environment.of_process(process))

    def renamed(self, name: str) -> Launch | None:
        """The same for a newcomer; None where the command is a program of the user's own, which names its peer itself.

        Of settings that are given twice, the last counts.
        """
        if not {"train", "join"} & set(self.command[:4]):
            return None
        ports = ("--set", "local.port=0", "--set", "local.sidecar_port=0")
        return Launch((*self.command, "--set", f"local.peer={name}", *ports), self.folder, self.environment)


class Rehearsal:
    """Plays faults. Leaving the `with` block thaws what it stopped, and ends what it started.

    One thread: the caller's, which must be the main thread.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kinds: Sequence[str],
        random: random.Random,
        min_living: int,
        stop_s: float,
        say: Callable[[str], None],
    ) -> None:
        """At least `min_living` peers are left alone. A stop lasts up to `stop_s`. Raises LocalError if `folder` is no
        run's."""
        self._peers = LocalPeers(folder)
        self._folder, self._kinds, self._random = folder, tuple(kinds), random
        self._min_living, self._stop_s, self._say = min_living, stop_s, say
        self._sink = JsonLinesSink(folder / f"{NAME}.jsonl")
        self._events = EventLog(NAME, self._sink)
        self._frozen: list[tuple[float, int, LocalPeer]] = []
        self._gone: dict[str, Launch] = {}
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._numbers = itertools.count(1)

    def living(self) -> dict[str, LocalPeer]:
        for process in self._started.values():
            process.poll()
        return self._peers.living()

    def play(self) -> None:
        """One fault, if there is one that leaves enough peers alone; says so if not."""
        living = self.living()
        frozen = {peer.name for _, _, peer in self._frozen}
        free = [name for name in sorted(living) if name not in frozen]
        able = [kind for kind in self._kinds if kind == "join" or len(free) > self._min_living]
        if not able:
            self._say(f"nothing done: {len(free)} peers are well, and {self._min_living} have to be")
            return
        kind = self._random.choice(able)
        if kind == "join":
            self._join(living)
            return
        peer = living[self._random.choice(free)]
        try:
            {"kill": self._kill, "stop": self._stop, "leave": self._leave}[kind](peer)
        except psutil.NoSuchProcess:
            self._say(f"nothing done: {peer.name} has just ended")

    def thaw(self, *, before_s: float = float("inf")) -> None:
        """Let those go on whose time is over."""
        while self._frozen and self._frozen[0][0] <= before_s:
            _, _, peer = heapq.heappop(self._frozen)
            try:
                peer.process.send_signal(signal.SIGCONT)
                self._say(f"{peer.name} goes on")
            except psutil.NoSuchProcess:
                self._say(f"{peer.name} ended while it was stopped")

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.thaw()
        children.stop_all(self._started.values(), signal.SIGTERM, GRACE_S)
        self._sink.close()

    # ---- faults ----------------------------------------------------------------------------------

    def _kill(self, peer: LocalPeer) -> None:
        launch = Launch.of(peer.process)
        self._tell(PeerKilled(peer=peer.name, signal="SIGKILL"))  # first: whoever sees it end knows why
        peer.process.send_signal(signal.SIGKILL)
        self._gone[peer.name] = launch

    def _leave(self, peer: LocalPeer) -> None:
        launch = Launch.of(peer.process)
        self._tell(FaultPlayed("leave", peer.name))
        peer.process.send_signal(signal.SIGTERM)
        self._gone[peer.name] = launch

    def _stop(self, peer: LocalPeer) -> None:
        seconds = self._random.uniform(0.1, 1.0) * self._stop_s
        heapq.heappush(self._frozen, (time.monotonic() + seconds, next(self._numbers), peer))
        peer.process.send_signal(signal.SIGSTOP)
        self._tell(FaultPlayed("stop", peer.name, seconds))

    def _join(self, living: Mapping[str, LocalPeer]) -> None:
        """One that is gone comes back; if none is, a newcomer is started as another peer was."""
        back = sorted(set(self._gone) - set(living))
        if back:
            name = self._random.choice(back)
            launch = self._gone.pop(name)
        else:
            name = f"{NAME}-{next(self._numbers)}"
            pattern = living[self._random.choice(sorted(living))] if living else None
            made = Launch.of(pattern.process).renamed(name) if pattern else None
            if made is None:
                self._say("nobody joins: none is gone, and only peers of `atoll train` can be copied")
                return
            launch = made
        self._tell(FaultPlayed("join", name))
        self._spawn(name, launch)

    def _spawn(self, name: str, launch: Launch) -> None:
        try:
            with (self._folder / f"{name}.log").open("ab") as output:
                self._started[name] = subprocess.Popen(
                    launch.command,
                    cwd=launch.folder,
                    env=dict(launch.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=children.dies_with_parent(),
                )
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise LocalError(f"cannot start {name} again in {launch.folder}: {reason}") from None

    def _tell(self, event: Event) -> None:
        self._events.emit(event)
        self._say(sentence(NAME, event) or "")
