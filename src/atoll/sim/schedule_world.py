"""The world of a schedule: virtual time, processes, connections that delay, repeat, reorder and break, and
one journal.

Everything random comes from one generator, so a seed is a schedule. Within a connection a declaration comes
first, as it does on the wire; everything else may overtake, come twice, or still arrive after the connection
broke.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count
from typing import Any

from atoll.membership.messages import (
    Applied,
    CoordinatorMessage,
    Declare,
    Heartbeat,
    Message,
    Ready,
    Vote,
)
from atoll.membership.settings import CoordinatorSettings, Timeouts
from atoll.membership.steps import (
    JournalRecord,
)
from atoll.sim.schedule_checks import History
from atoll.sim.schedule_coordinator import Connection, VirtualCoordinator
from atoll.sim.schedule_engine import VirtualEngine
from atoll.sim.schedule_machines import Machines
from atoll.sim.schedule_peer import Held, Process, VirtualPeer

TIMEOUTS = Timeouts(
    heartbeat_s=1.0,
    dead_s=3.0,
    stall_s=12.0,
    ready_wait_s=10.0,
    grace_s=1.0,
    freeze_s=2.0,
    attempt_s=3.0,
    vote_s=2.0,
    connect_s=2.0,
    quorum_wait_s=8.0,
    coordinator_lost_s=9.0,
    relearn_s=3.0,
)
Note = Callable[[float, str, object, str], None]


class World:
    """Virtual time and everything that lives in it."""

    def __init__(
        self, rng: random.Random, machines: Machines, settings: CoordinatorSettings, note: Note
    ) -> None:
        self.rng, self.machines, self.settings = rng, machines, settings
        self._note = note
        self.now_s = 100.0
        weights = rng.choice(("tokens", "equal"))
        self.run_settings: dict[str, Any] = {
            "outer.weights": weights,
            "outer.steps_by_speed": weights == "tokens",
            "outer.codec": "int8",
            "run.seed": 1,
        }
        self.first_state = Held(version=0, version_term=0, digest="0", round=0, run_step=0)
        self.target_version = rng.randint(3, 6)
        self.history = History(settings.min_peers, self.first_state.digest)
        self.engine = VirtualEngine(self)
        self.journal: list[JournalRecord] = []
        self.snapshots: list[Held] = []
        self.finished = ""
        self.effects_to_crash: int | None = None
        self.trouble = True
        self.processes: list[VirtualPeer] = []
        self._events: list[tuple[float, int, Process | None, Callable[[], None]]] = []
        self._numbers = count()
        self._incarnations = count(1)
        self.coordinator: VirtualCoordinator
        self._start_coordinator()

    def note(self, who: str, what: object, reason: str) -> None:
        self._note(self.now_s, who, what, reason)

    # ---- time --------------------------------------------------------------------------------------------

    def after(self, seconds: float, process: Process | None, action: Callable[[], None]) -> None:
        """Do `action` in the name of `process` (None: of fate), when it is thawed, unless it is gone by
        then.
        """
        heapq.heappush(self._events, (self.now_s + seconds, next(self._numbers), process, action))

    def deliver(self, process: Process, action: Callable[[], None], extra_s: float = 0.0) -> None:
        self.after(self.rng.expovariate(20.0) + extra_s, process, action)

    def next_event(self) -> bool:
        """One event; False when there is none."""
        if not self._events:
            return False
        at_s, _, process, action = heapq.heappop(self._events)
        self.now_s = max(self.now_s, at_s)
        if process is None:
            action()
        elif process.frozen_until_s > self.now_s:
            self.after(process.frozen_until_s - self.now_s, process, action)
        elif process.alive:
            action()
        return True

    def is_over(self) -> bool:
        """Whether all have ended. A coordinator whose run never began may wait for peers for ever."""
        idle = not self.coordinator.state.started and not self.coordinator.state.peers
        return (bool(self.finished) or idle) and all(process.ended for process in self.processes)

    # ---- processes ---------------------------------------------------------------------------------------

    def start_peer(self, peer: str, held: Held | None = None) -> None:
        """A new process; `held` is the snapshot that it finds on its disk."""
        self.processes.append(
            VirtualPeer(self, peer, f"i{next(self._incarnations)}", held or self.first_state)
        )

    def kill(self, process: VirtualPeer, *, silent: bool = False) -> None:
        """SIGKILL, or (silent) the machine vanishes and nobody's socket says so."""
        self.note(process.name, "killed", "silently" if silent else "")
        process.alive = False
        process.ended = "killed"
        if not silent:
            self.engine.gone(process)
            self.hang_up(process)

    def hang_up(self, process: VirtualPeer) -> None:
        if process.connection is not None:
            self.close(process.connection, delay_s=0.05)

    def crashes_here(self) -> bool:
        """Whether the coordinator dies before its next effect."""
        if self.effects_to_crash is None:
            return False
        self.effects_to_crash -= 1
        return self.effects_to_crash < 0

    def crash(self) -> None:
        self.note("coordinator", "crashes", "")
        self.effects_to_crash = None
        self.coordinator.alive = False
        for connection in self.coordinator.connections.values():
            self.close(connection, delay_s=0.1)
        self.after(self.rng.uniform(0.2, 4.0), None, self._start_coordinator)

    def lose_journal(self) -> None:
        """The coordinator's disk is gone with it: the next one begins with nothing."""
        self.note("coordinator", "loses its journal", "")
        self.journal.clear()
        self.history.journal_is_lost()
        if self.coordinator.alive:
            self.crash()

    def _start_coordinator(self) -> None:
        VirtualCoordinator(self)

    def coordinator_finished(self, reason: str) -> None:
        self.note("coordinator", "finished", reason)
        self.finished = reason
        self.coordinator.alive = False
        for connection in self.coordinator.connections.values():
            self.close(connection, delay_s=0.5)

    # ---- the network -------------------------------------------------------------------------------------

    def connect(self, process: VirtualPeer) -> None:
        """Try to reach the coordinator until somebody answers."""
        if process.ended or process.connection is not None:
            return
        if not self.coordinator.alive:
            self.after(self.rng.uniform(0.1, 1.0), process, lambda: self.connect(process))
            return
        connection = process.connection = Connection(process)
        coordinator = self.coordinator
        self.deliver(coordinator, lambda: coordinator.accept(connection))
        self.after(TIMEOUTS.connect_s, process, lambda: self._give_up(connection))

    def _give_up(self, connection: Connection) -> None:
        if not connection.proven:
            self.close(connection, delay_s=0.0)

    def close(self, connection: Connection, *, delay_s: float) -> None:
        """Both ends hear of it, each in its own time."""
        if not connection.open:
            return
        connection.open = False
        process, coordinator = connection.process, self.coordinator
        self.after(delay_s + self.rng.uniform(0.0, 0.5), process, lambda: process.disconnected(connection))
        self.after(self.rng.uniform(0.0, 0.5), coordinator, lambda: coordinator.dropped(connection))

    def peer_sends(self, process: VirtualPeer, message: Message) -> None:
        connection, coordinator = process.connection, self.coordinator
        if connection is None or not connection.proven:
            return

        def arrive() -> None:
            if connection.open or self.rng.random() < 0.5:
                coordinator.hear(connection, message)
            elif self.trouble and isinstance(message, Ready | Vote | Applied | Heartbeat):
                coordinator.hear(connection, message, late=True)

        delay_s = 0.0 if isinstance(message, Declare) else self._trouble_s()
        self.deliver(coordinator, arrive, delay_s)
        again = 0.3 if isinstance(message, Ready | Vote) else 0.0 if isinstance(message, Declare) else 0.1
        if self.trouble and self.rng.random() < again:
            self.deliver(coordinator, arrive, self.rng.uniform(0.0, 4.0))

    def coordinator_sends(self, connection: Connection, message: CoordinatorMessage) -> None:
        process = connection.process

        def arrive() -> None:
            if connection.open or self.rng.random() < 0.5:
                process.hear(connection, message)
            elif self.trouble and self.rng.random() < 0.2:
                process.hear(None, message)

        self.deliver(process, arrive, self._trouble_s())
        if self.trouble and self.rng.random() < 0.1:
            self.deliver(process, arrive, self.rng.uniform(0.0, 4.0))

    def _trouble_s(self) -> float:
        return self.rng.uniform(0.0, 1.0) if self.trouble and self.rng.random() < 0.1 else 0.0
