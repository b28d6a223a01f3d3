"""A virtual coordinator: one life of the real machine, fed from the virtual network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from atoll.membership import coordinator
from atoll.membership.messages import CoordinatorMessage, Refused
from atoll.membership.steps import (
    CloseConnection,
    CoordinatorEvent,
    Finish,
    Journal,
    PeerArrived,
    PeerDropped,
    PeerSaid,
    Send,
    Step,
    Tick,
)
from atoll.plan.planner import choose
from atoll.sim.schedule_peer import Process, VirtualPeer
from atoll.values import PlanChoice, PlanRequest

if TYPE_CHECKING:
    from atoll.sim.schedule_world import World

TICK_S = 0.5


_planned: dict[tuple[object, ...], PlanChoice] = {}


def make_lanes(request: PlanRequest) -> PlanChoice:
    """The real planner's answers, each worked out once: schedules ask for the same few over and over."""
    lanes = request.previous.lanes if request.previous else ()
    question = (request.members, request.contributors, request.broken, lanes, request.topology)
    if question not in _planned:
        _planned[question] = choose(request)
    return _planned[question]


class Connection:
    """One connection of a peer's process to one life of the coordinator."""

    def __init__(self, process: VirtualPeer) -> None:
        self.process = process
        self.proven = False
        self.open = True


class VirtualCoordinator(Process):
    """One life of the coordinator: the real machine, fed from the virtual network."""

    def __init__(self, world: World) -> None:
        super().__init__("coordinator")
        self.world = world
        world.coordinator = self
        self.connections: dict[str, Connection] = {}
        begun = world.machines.coordinator_start(
            world.settings, tuple(world.journal), b"key", world.run_settings, world.now_s
        )
        self.state = begun.state
        world.note(self.name, "start", begun.reason)
        self.carry_out(begun)
        world.after(TICK_S, self, self.tick)

    def tick(self) -> None:
        self.feed(Tick())
        self.world.after(TICK_S, self, self.tick)

    def feed(self, event: CoordinatorEvent) -> None:
        before = self.state
        step = self.world.machines.coordinator_step(before, event, self.world.now_s, make_lanes=make_lanes)
        if isinstance(event, Tick) and not step.effects:
            self.state = step.state
            return
        self.world.note(self.name, event, step.reason)
        self.world.history.check_step(before, event, step)
        self.state = step.state
        self.carry_out(step)

    def carry_out(self, step: Step[Any]) -> None:
        for effect in step.effects:
            if self.world.crashes_here():
                self.world.crash()
                return
            match effect:
                case Journal(record=record):
                    self.world.note("journal", record, "")
                    self.world.journal.append(record)
                    self.world.history.journaled(record)
                case Send(peer=peer) if connection := self.connections.get(peer):
                    self.world.history.sent(peer, connection.process.incarnation, effect)
                    self.world.coordinator_sends(connection, cast(CoordinatorMessage, effect.message))
                case CloseConnection(peer=peer, incarnation=incarnation):
                    connection = self.connections.get(peer)
                    if connection is not None and connection.process.incarnation == incarnation:
                        self.world.close(connection, delay_s=0.3)
                case Finish(reason=reason):
                    self.world.coordinator_finished(reason)
                    return

    # ---- connections -------------------------------------------------------------------------------------

    def accept(self, connection: Connection) -> None:
        process = connection.process
        if not connection.open:
            return
        refusal = coordinator.refusal(self.state, process.peer, process.incarnation, self.world.now_s)
        if refusal:
            self.world.coordinator_sends(connection, Refused("peer", refusal))
            connection.proven = True
            self.feed(PeerArrived(process.peer, process.incarnation, "virtual"))
            return
        old = self.connections.get(process.peer)
        self.connections[process.peer] = connection
        if old is not None:
            self.world.close(old, delay_s=0.1)
        self.feed(PeerArrived(process.peer, process.incarnation, "virtual"))
        if self.alive:
            term = self.state.term
            self.world.deliver(process, lambda: process.connected(connection, term))

    def hear(self, connection: Connection, message: Any, late: bool = False) -> None:
        if late or self.connections.get(connection.process.peer) is connection:
            self.feed(PeerSaid(connection.process.peer, connection.process.incarnation, message))

    def dropped(self, connection: Connection) -> None:
        if self.connections.get(connection.process.peer) is connection:
            del self.connections[connection.process.peer]
            self.feed(PeerDropped(connection.process.peer, connection.process.incarnation))
