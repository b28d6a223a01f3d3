"""One run's coordinator at work: feeds the coordinator machine from sockets and carries out what it decides.

One event loop, no threads. One task (`Service._hear_all`) owns the machine's state; connections put what they hear into
its inbox, and it carries out effects in order: a record is in the journal before anything that follows from it is sent.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import WSMsgType, web

from atoll import log
from atoll.addresses import join_address
from atoll.clock import MonotonicClock
from atoll.events import CoordinatorListening, EventLog
from atoll.membership import auth, coordinator, gate, messages, status, steps
from atoll.membership.coordinator import CoordinatorState
from atoll.membership.coordinator_draft import MakeLanes
from atoll.membership.doorway import Doorway
from atoll.membership.examination import EXAMINATION_PATH
from atoll.membership.examining import ExaminationDoor
from atoll.membership.frames import Assembler, OversizedError
from atoll.membership.gate import Gate
from atoll.membership.journal import Journal
from atoll.membership.link import PATH
from atoll.membership.messages import Refused, Scalar, Welcome
from atoll.membership.operator import OPERATOR_PATH, Reply, VpnAnnounce
from atoll.membership.operator_door import OperatorDoor
from atoll.membership.peer_connection import FLUSH_S, PeerConnection
from atoll.membership.register import Register
from atoll.membership.registrar import Registrar, Trust
from atoll.membership.settings import CoordinatorSettings
from atoll.membership.steps import (
    CoordinatorEvent,
    JournalRecord,
    PeerArrived,
    PeerDropped,
    PeerSaid,
    Step,
    Tick,
)
from atoll.membership.vpn_board import VpnBoard, network_of

INBOX_EVENTS = 1024
STOPPED = 143

_log = log.get(__name__)


def _refuse(connection: PeerConnection, reason: str) -> None:
    """Close a connection whose place another one has; `reason` "" if that is the same process's."""
    if reason:
        connection.send(Refused("peer", reason))
    connection.close()


class Service:
    """One run's coordinator: the machine's state, the connections, and the way between them."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        register: Register,
        trust: Trust | None,
        journal: Journal,
        nested_settings: dict[str, Any] | None,
        event_log: EventLog,
        make_lanes: MakeLanes,
    ) -> None:
        self._settings = settings
        self._register, self._trust = register, trust
        self._journal = journal
        register.learn(*journal.records)
        self._nested_settings = nested_settings
        self._events = event_log
        self._make_lanes = make_lanes
        self._clock = MonotonicClock()
        self._gate = Gate(trust.context if trust else None)
        self._inbox: asyncio.Queue[tuple[PeerConnection | None, CoordinatorEvent]] = asyncio.Queue(
            INBOX_EVENTS
        )
        self._operators = OperatorDoor(
            register,
            Registrar(
                settings.run,
                register,
                trust,
                self._keep,
                event_log.emit,
                lambda peer: self._state.eviction(peer, self._clock.now_s()),
            ),
            self._gate,
            tls=trust is not None,
            status=lambda: status.report(self._state, self._clock.now_s()),
            settings=lambda: self._nested_settings or self._state.run_settings,
            hear=lambda event: self._inbox.put((None, event)),
            vpn=self._hear_vpn,
        )
        self._connections: dict[str, PeerConnection] = {}
        self._finish: steps.Finish | None = None

    def begin(self, run_settings: dict[str, Scalar] | None) -> None:
        """Start the machine from the journal; the new term is journaled when this returns."""
        new_key = auth.new_session_key()  # used only if the journal holds none
        records, now_s = self._journal.records, self._clock.now_s()
        begun = coordinator.start(self._settings, records, new_key, run_settings, now_s)
        self._state = begun.state
        self._vpn = VpnBoard(network_of(self._settings.run, self._lasting_secret()), now_s)
        self._carry_out(begun)

    async def run(
        self, listeners: list[socket.socket], ready: Callable[[str, int], None], stop: asyncio.Event
    ) -> tuple[int, str]:
        """Serve until the machine finishes, `stop` is set, or this machine is in the way (LocalError)."""
        if self._finish is None:
            await self._serve_peers(listeners, ready, stop)
        if self._finish is None:
            return STOPPED, "stopped on request; peers reconnect to the next coordinator with this journal"
        return self._finish.exit_code, self._finish.reason

    async def _serve_peers(
        self, listeners: list[socket.socket], ready: Callable[[str, int], None], stop: asyncio.Event
    ) -> None:
        examiner = ExaminationDoor(
            self._register, self._gate, tls=self._trust is not None, state=lambda: self._state
        )
        visitors = {
            PATH: self._attend,
            OPERATOR_PATH: self._operators.attend,
            EXAMINATION_PATH: examiner.attend,
        }
        doorway = Doorway(
            "atoll coordinator", visitors, authority=self._trust.authority if self._trust else ""
        )
        deciding = asyncio.create_task(self._hear_all())
        stopping = asyncio.create_task(stop.wait())
        tasks = [deciding, stopping]
        admitting = (gate.admit_connections(each, self._gate, doorway.http) for each in listeners)
        tasks += [asyncio.create_task(each) for each in admitting]
        host, port = listeners[0].getsockname()[:2]
        restarted = bool(self._journal.records)
        self._events.emit(CoordinatorListening(join_address(host, port), self._state.term, restarted))
        ready(host, port)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._hang_up(doorway)

    async def _hear_all(self) -> None:
        """Hear events one by one until the machine finishes. Time comes first: none sees a stale clock."""
        tick_s = self._settings.timeouts.heartbeat_s / 4
        last_tick_s = self._clock.now_s()
        while self._finish is None:
            heard = await self._next_heard(max(0.0, last_tick_s + tick_s - self._clock.now_s()))
            if self._clock.now_s() >= last_tick_s + tick_s:
                last_tick_s = self._clock.now_s()
                self._step(Tick())
            if heard is not None:
                self._hear(*heard)

    async def _next_heard(self, timeout_s: float) -> tuple[PeerConnection | None, CoordinatorEvent] | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._inbox.get()
        except TimeoutError:
            return None

    def _hear(self, connection: PeerConnection | None, event: CoordinatorEvent) -> None:
        """Only the peer's present connection has a voice. Operators come without one."""
        if connection is None:
            self._step(event)
        elif isinstance(event, PeerArrived):
            self._arrive(connection, event)
        elif self._connections.get(connection.peer) is connection:
            if isinstance(event, PeerDropped):
                del self._connections[connection.peer]
            self._step(event)

    def _arrive(self, connection: PeerConnection, event: PeerArrived) -> None:
        """The new connection takes the old one's place, unless another process is to keep that name."""
        now_s = self._clock.now_s()
        refusal = coordinator.refusal(self._state, connection.peer, connection.incarnation, now_s)
        old = self._connections.get(connection.peer)
        if not refusal:
            self._connections[connection.peer] = connection
            if connection.proven.serial:
                self._register.seen(connection.proven.serial)
        # Only now: who is let in gets the key that holds, and whom the machine refuses one that opens nothing. It has
        # to be welcomed all the same, or it would not know that its own coordinator speaks.
        key = auth.new_session_key() if refusal else self._state.session_key
        connection.send(self._welcome(connection.proven, connection.address, key))
        self._step(event, now_s)
        if refusal:
            _refuse(connection, refusal)
        elif old is not None:
            _refuse(old, coordinator.refusal(self._state, old.peer, old.incarnation, now_s))

    def _step(self, event: CoordinatorEvent, now_s: float | None = None) -> None:
        """One step of the machine. Nothing of a step leaves this process if part of it could not be journaled."""
        try:
            self._journal.hold()
            self._take_step(event, self._clock.now_s() if now_s is None else now_s)
        except BaseException:
            for connection in self._connections.values():
                connection.abort()
            raise

    def _take_step(self, event: CoordinatorEvent, now_s: float) -> None:
        step = coordinator.step(self._state, event, now_s, make_lanes=self._make_lanes)
        self._state = step.state
        self._carry_out(step)

    def _carry_out(self, step: Step[CoordinatorState]) -> None:
        if any(isinstance(effect, steps.Journal | steps.Emit) for effect in step.effects):
            _log.info("%s", step.reason)
        for effect in step.effects:
            match effect:
                case steps.Journal(record):
                    self._keep(record)
                    self._register.learn(record)
                case steps.Send(peer, message):
                    if connection := self._connections.get(peer):
                        connection.send(message)
                case steps.Emit(event):
                    self._events.emit(event)
                case steps.CloseConnection(peer, incarnation):
                    connection = self._connections.get(peer)
                    if connection is not None and connection.incarnation == incarnation:
                        connection.close()
                case steps.Answer(ticket, reply):
                    self._operators.answer(ticket, reply)
                case steps.Finish():
                    self._finish = effect
                case _:
                    raise AssertionError(f"not an effect of the coordinator: {effect!r}")

    async def _attend(self, websocket: web.WebSocketResponse, transport: asyncio.Transport | None) -> None:
        """One connection from its first byte to its last."""
        tls = self._trust is not None
        proven = await gate.prove(websocket, transport, self._settings.run, self._register, tls=tls)
        if not isinstance(proven, gate.Proven):
            await self._gate.turn_away(websocket, transport, proven)
            return
        if transport is None:
            return
        self._gate.proved(transport)
        self._journal.hold()  # who leads no more welcomes nobody
        connection = PeerConnection(websocket, transport, proven)
        sender = asyncio.create_task(connection.empty_outbox())
        try:
            await self._listen(websocket, connection)
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def _listen(self, websocket: web.WebSocketResponse, connection: PeerConnection) -> None:
        who = (connection.peer, connection.incarnation)
        await self._inbox.put((connection, PeerArrived(*who, connection.address)))
        try:
            assembler = Assembler()
            while (frame := await websocket.receive()).type is WSMsgType.BINARY:
                whole = assembler.feed(frame.data)
                if whole is not None:
                    await self._inbox.put((connection, PeerSaid(*who, messages.decode_from_peer(whole))))
        except (OversizedError, msgspec.MsgspecError) as error:
            _log.warning("peer %s sent what is no message (%s); closing", connection.peer, error)
            connection.abort()
        finally:
            await self._inbox.put((connection, PeerDropped(*who)))

    def _keep(self, record: JournalRecord) -> None:
        self._journal.append(record)

    def _lasting_secret(self) -> bytes:
        """Of this run alone, and the same for as long as it lasts: a session key may change where there is TLS."""
        return self._trust.authority.encode() if self._trust else self._state.session_key

    def _hear_vpn(self, said: VpnAnnounce, host: str) -> Reply:
        now_s = self._clock.now_s()
        evicted = {peer for peer, each in self._state.evictions.items() if each.until_s > now_s}
        links = {link: seen.bytes_per_s for link, seen in self._state.rates.items()}
        return self._vpn.hear(said, host, now_s, evicted=evicted, links=links)

    def _welcome(self, proven: gate.Proven, address: str, session_key: bytes) -> Welcome:
        who, key = proven.handshake, proven.key
        sealed = who.seal(key, session_key)
        return Welcome(
            proof=who.coordinator_proof(key, sealed),
            sealed_session_key=sealed,
            term=self._state.term,
            settings=self._nested_settings or self._state.run_settings,
            timeouts=msgspec.structs.asdict(self._settings.timeouts),
            seen_as=address,
            renew_s=self._register.renew_s(proven.serial) if proven.serial else 0.0,
        )

    async def _hang_up(self, doorway: Doorway) -> None:
        """Close all sockets; when the run is over, first let the last words out, for at most FLUSH_S."""
        self._gate.close()
        for connection in self._connections.values():
            if self._finish is not None:
                connection.close()
            else:
                connection.abort()
        await doorway.close(FLUSH_S)
