"""Random faults for a swarm of quadratic peers, by one seed: who is hit, how, when, and when it is made good again.

Kinds: `kill` (SIGKILL; started again under its name 0.5 to 2 s later), `stop` (SIGSTOP, SIGCONT 0.3 to 4 s later),
`join` (a name that is not there), `leave` (SIGTERM), `coordinator` (SIGKILL, started again with its journal). At least
two members are left alone at every moment. Faults overlap as chance has it: none waits until the last one is healed.
"""

from __future__ import annotations

import heapq
import itertools
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from support.swarm import Swarm

KINDS = ("kill", "stop", "join", "leave", "coordinator")
MIN_MEMBERS, FEW, MAX_PEERS = 2, 4, 9
NAMES = tuple(f"p{number:02d}" for number in range(12))
CENTERS = {name: float(2**number) for number, name in enumerate(NAMES)}


@dataclass(frozen=True)
class Fault:
    kind: str
    peer: str
    at_wall_s: float


@dataclass
class Chance:
    """Plays faults on the swarm; call `tick` often, from one thread. `start` starts a peer by its name."""

    swarm: Swarm
    random: random.Random
    every_s: float
    start: Callable[[str], None]
    say: Callable[[str], None]
    faults: list[Fault] = field(default_factory=list)
    ended_alone: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._next_s = time.monotonic() + self._pause_s()
        self._frozen: set[str] = set()
        self._away: set[str] = set()  # killed and to come back, or asked to leave

    def tick(self) -> None:
        """Whatever is due by now."""
        self._heal(until_s=time.monotonic())
        self.notice_ends()
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._pause_s()
            self._fault()

    def heal_all(self) -> None:
        """All that was to be made good later, now; no fault follows."""
        self._heal(until_s=float("inf"))

    def running(self) -> set[str]:
        return {name for name, peer in self.swarm.peers.items() if peer.process.poll() is None}

    def members(self) -> set[str]:
        """As the coordinator last said it, of those that are not hit at the moment."""
        told = [event["members"] for event in self.swarm.events() if event.get("members") is not None]
        return set(told[-1] if told else ()) & self.running() - self._frozen - self._away

    def notice_ends(self) -> None:
        """Peers that nobody told to end."""
        for name in set(self.swarm.peers) - self.running() - self._away:
            peer = self.swarm.peers[name]
            words = peer.output().strip().splitlines()[-1:]
            self.ended_alone.append(f"{name} ended with {peer.process.returncode}: {' '.join(words)}")
            self.say(self.ended_alone[-1])
            self._away.add(name)

    # ---- faults ------------------------------------------------------------------------------------------

    def _pause_s(self) -> float:
        return min(self.random.expovariate(1 / self.every_s), 3 * self.every_s)

    def _fault(self) -> None:
        kind = self.random.choice(KINDS if self.swarm.coordinator_listens() else KINDS[:-1])
        members, running = self.members(), self.running()
        if kind == "leave" and len(members) <= FEW:
            kind = "join"
        if kind == "join" and len(running) >= MAX_PEERS:
            kind = "leave"
        if kind == "coordinator":
            return self._hit_coordinator()
        if kind == "join":
            unused = [name for name in NAMES if name not in self.swarm.peers]
            return self._join(self.random.choice(unused or sorted(set(NAMES) - running)))
        free = running - self._frozen - self._away
        spare = free if len(members) > MIN_MEMBERS else free - members  # those who catch up may be hit, too
        if not spare:
            return self._join(self.random.choice(sorted(set(NAMES) - running)))
        getattr(self, f"_{kind}")(self.random.choice(sorted(spare)))

    def _note(self, kind: str, peer: str, more: str = "") -> None:
        self.faults.append(Fault(kind, peer, time.time()))
        self.say(f"{kind} {peer}{more}")

    def _kill(self, name: str) -> None:
        pause_s = self.random.uniform(0.5, 2)
        self._note("kill", name, f", back in {pause_s:.1f} s")
        self._away.add(name)
        self.swarm.peers[name].process.kill()
        self._later(pause_s, lambda: self._begin(name))

    def _stop(self, name: str) -> None:
        pause_s = self.random.uniform(0.3, 4)
        self._note("stop", name, f" for {pause_s:.1f} s")
        self._frozen.add(name)
        self.swarm.peers[name].send(signal.SIGSTOP)
        self._later(pause_s, lambda: self._thaw(name))

    def _leave(self, name: str) -> None:
        self._note("leave", name)
        self._away.add(name)
        self.swarm.peers[name].send(signal.SIGTERM)

    def _join(self, name: str) -> None:
        self._note("join", name)
        self._begin(name)

    def _hit_coordinator(self) -> None:
        pause_s = self.random.uniform(0, 1)
        self._note("coordinator", "coordinator", f", back in {pause_s:.1f} s")
        self.swarm.kill_coordinator()
        self._later(pause_s, lambda: self.swarm.spawn_coordinator() and None)

    def _begin(self, name: str) -> None:
        self._away.discard(name)
        self._frozen.discard(name)
        self.start(name)

    def _thaw(self, name: str) -> None:
        self._frozen.discard(name)
        self.swarm.peers[name].send(signal.SIGCONT)

    def _later(self, pause_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + pause_s, next(self._numbers), act))

    def _heal(self, until_s: float) -> None:
        while self._due and self._due[0][0] <= until_s:
            heapq.heappop(self._due)[2]()
