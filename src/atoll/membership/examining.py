"""The coordinator's end of examinations: what it sees of a machine that is to take part, and whether it reaches it.

Runs on the coordinator's event loop, reads the machine's state and changes nothing: a run does not notice. It dials
only the very address that a proven connection comes from, so that nobody can have it knock elsewhere, and takes only
an answer that holds the asker's nonce. All is bounded: MOST_AT_ONCE examinations, one for each source, each
EXAMINE_S long; at most MOST_A_MINUTE from one source.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable

import msgspec
from aiohttp import WSMsgType, web

from atoll import __version__
from atoll.errors import LocalError
from atoll.membership import gate, messages
from atoll.membership.coordinator_state import CoordinatorState, PeerRecord
from atoll.membership.examination import (
    CHALLENGE_BYTES,
    ECHO_BYTES,
    MOST_DIALS,
    NONCE_BYTES,
    DialBack,
    DialedBack,
    Examined,
    ExamineMe,
    MemberSeen,
    decode_from_asker,
    echo,
)
from atoll.membership.frames import pack
from atoll.membership.listening import listening
from atoll.membership.operator import OperatorWelcome
from atoll.membership.operator_door import prove_operator
from atoll.membership.planning import codec_of, num_elements, wire_bytes
from atoll.membership.rates import known_links
from atoll.membership.register import Register, Unknown
from atoll.membership.registrar import Holder
from atoll.membership.status import MAX_LINKS, pace

EXAMINE_S = 15.0
DIAL_S = 3.0
MOST_AT_ONCE = 8
MOST_A_MINUTE = 30
MOST_SHOWN = 64
"""Members that are told of; a machine that looks measures its way to a few of them only."""
LEAST_PORT = 1024
_MAPPING_CONNECTIONS = 4


class ExaminationDoor:
    """Lets those in who may join, by their token or a peer's certificate, and answers them. `state` gives the machine's
    state as it is."""

    def __init__(
        self,
        register: Register,
        strangers: gate.Gate,
        *,
        tls: bool,
        state: Callable[[], CoordinatorState],
        wall_time_s: Callable[[], float] = time.time,
    ) -> None:
        self._register = register
        self._gate = strangers
        self._tls = tls
        self._state = state
        self._wall_time_s = wall_time_s
        self._busy: set[str] = set()
        self._begun_s: dict[str, deque[float]] = {}

    async def attend(self, websocket: web.WebSocketResponse, transport: asyncio.Transport | None) -> None:
        """One connection from its first byte to its last."""
        proven = await prove_operator(websocket, transport, self._register, tls=self._tls)
        if not isinstance(proven, tuple):
            await self._gate.turn_away(websocket, transport, proven)
            return
        if transport is None:
            return
        who, proof = proven
        self._gate.proved(transport)
        source = gate.address_of(transport)
        try:
            async with asyncio.timeout(EXAMINE_S):
                await _say(websocket, OperatorWelcome(proof=proof))
                refused = self._may_not(who) or self._refusal(source)
                if refused is not None:
                    await _say(websocket, refused)
                else:
                    await self._examine(websocket, transport, source)
                await websocket.close()
        except TimeoutError:
            transport.abort()

    def _may_not(self, who: Holder) -> messages.Refused | None:
        """What to refuse who may only watch, or may nothing any more."""
        try:
            if who.serial:
                self._register.certificate(who.serial)
            else:
                self._register.key_of(who.token, "join")
        except Unknown as unknown:
            return messages.Refused("token", unknown.reason)
        return None

    def _refusal(self, source: str) -> messages.Refused | None:
        """Why this source has to wait; None if it need not, and then it counts."""
        now_s = asyncio.get_running_loop().time()
        for each in [each for each, begun in self._begun_s.items() if begun[-1] < now_s - 60]:
            del self._begun_s[each]
        begun = self._begun_s.get(source, deque(maxlen=MOST_A_MINUTE))
        if source in self._busy or len(self._busy) >= MOST_AT_ONCE:
            why = f"the coordinator examines {len(self._busy)} machines already; ask again in {EXAMINE_S:g} s"
            return messages.Refused("busy", why)
        if len(begun) == MOST_A_MINUTE and begun[0] > now_s - 60:
            why = f"{MOST_A_MINUTE} examinations a minute from {source}; ask again in a minute"
            return messages.Refused("busy", why)
        begun.append(now_s)
        self._begun_s[source] = begun
        return None

    async def _examine(
        self, websocket: web.WebSocketResponse, transport: asyncio.Transport, source: str
    ) -> None:
        self._busy.add(source)
        try:
            wanted = await _hear(websocket)
            if not isinstance(wanted, ExamineMe) or len(wanted.nonce) != NONCE_BYTES:
                return
            peername, sockname = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
            if not peername or not sockname:
                return
            async with _mapping_ports(sockname[0], wanted.nonce) as ports:
                await _say(websocket, self._examined(peername, ports))
                for _ in range(MOST_DIALS):
                    order = await _hear(websocket)
                    if not isinstance(order, DialBack):
                        return
                    await _say(websocket, await dial_back(source, order.port, wanted.nonce))
        finally:
            self._busy.discard(source)

    def _examined(self, peername: tuple[str, int], mapping_ports: tuple[int, ...]) -> Examined:
        state = self._state()
        members = state.members()
        settings = state.run_settings or {}
        inner_steps = settings.get("outer.inner_steps")
        return Examined(
            run=state.settings.run,
            package=__version__,
            seen_host=str(peername[0]),
            seen_port=int(peername[1]),
            wall_time_s=self._wall_time_s(),
            mapping_ports=mapping_ports,
            members=tuple(_seen(record) for record in members[:MOST_SHOWN]),
            num_members=len(members),
            links=known_links(state.rates)[:MAX_LINKS],
            wire_bytes=wire_bytes(state),
            elements=num_elements(state),
            codec=codec_of(state),
            topology=state.settings.topology,
            connections=state.settings.connections,
            inner_steps=inner_steps if isinstance(inner_steps, int) else 0,
            round_s=pace(state.recollection.commits)[0],
            max_up={
                record.peer: sum(rank.max_up for rank in record.ranks) for record in members[:MOST_SHOWN]
            },
            max_down={
                record.peer: sum(rank.max_down for rank in record.ranks) for record in members[:MOST_SHOWN]
            },
        )


async def dial_back(host: str, port: int, nonce: bytes) -> DialedBack:
    """Connect to `host`, the source of the connection that asked, and see whether its own listener answers. Takes at
    most DIAL_S. Of the coordinator's own machine no more is told than whether it did: nobody is to look for its ports.
    """
    if not LEAST_PORT <= port <= 65535:
        return DialedBack(port, False, f"ports below {LEAST_PORT} are not dialled")
    try:
        async with asyncio.timeout(DIAL_S):
            challenge = secrets.token_bytes(CHALLENGE_BYTES)
            answer = await _ask(host, port, challenge)
    except TimeoutError:
        why = f"no answer in {DIAL_S:g} s"
    except ConnectionRefusedError:
        why = "connection refused"
    except asyncio.IncompleteReadError:
        why = "something else answered"
    except OSError as error:
        why = (error.strerror or str(error)).lower()
    else:
        why = "" if hmac.compare_digest(answer, echo(nonce, challenge)) else "something else answered"
    if why and _is_own(host):
        why = "not reached"
    return DialedBack(port, not why, why)


async def _ask(host: str, port: int, challenge: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(host, port, limit=ECHO_BYTES)
    try:
        writer.write(challenge)
        return await reader.readexactly(ECHO_BYTES)
    finally:
        writer.transport.abort()


def _is_own(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return False


@contextlib.asynccontextmanager
async def _mapping_ports(host: str, nonce: bytes) -> AsyncGenerator[tuple[int, ...]]:
    """Two free ports beside the one that the asker came to: from what source it is seen at each shows how it is
    translated on the way. They answer only who says the nonce, and few; others are strangers, with a stranger's limits.
    They tell nothing else, so they speak plainly in a run with TLS too. () where none can be opened."""
    strangers = gate.Gate()
    over, writers = False, list[asyncio.StreamWriter]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (
            over or len(writers) >= _MAPPING_CONNECTIONS
        ):  # it may be accepted in the moment that all is closed
            writer.transport.abort()
            return
        writers.append(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            if hmac.compare_digest(await reader.readexactly(NONCE_BYTES), nonce):
                assert isinstance(writer.transport, asyncio.Transport)
                strangers.proved(writer.transport)
                host_seen, port_seen = writer.get_extra_info("peername")[:2]
                writer.write(f"{host_seen} {port_seen}\n".encode())
                return  # it stays open to the end, and so does what translates it
        writer.transport.abort()

    def conversation() -> asyncio.Protocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(NONCE_BYTES), answer)

    admitting: list[asyncio.Task[None]] = []
    with contextlib.ExitStack() as opened:
        try:
            listeners = [opened.enter_context(listening(host, 0))[0] for _ in range(2)]
        except LocalError:
            listeners = []
        try:
            admitting += [
                asyncio.create_task(gate.admit_connections(each, strangers, conversation))
                for each in listeners
            ]
            yield tuple(each.getsockname()[1] for each in listeners)
        finally:
            over = True
            for task in admitting:
                task.cancel()
            await asyncio.gather(*admitting, return_exceptions=True)
            strangers.close()
            for writer in writers:
                writer.transport.abort()


def _seen(record: PeerRecord) -> MemberSeen:
    announced = record.ranks[0] if record.ranks and record.ranks[0].host else None
    return MemberSeen(record.peer, msgspec.structs.replace(announced, ranges=()) if announced else None)


async def _say(websocket: web.WebSocketResponse, message: messages.Message) -> None:
    for part in pack(message):
        await websocket.send_bytes(part)


async def _hear(websocket: web.WebSocketResponse) -> ExamineMe | DialBack | None:
    """One message, or None for anything else."""
    frame = await websocket.receive()
    if frame.type is not WSMsgType.BINARY:
        return None
    try:
        return decode_from_asker(frame.data)
    except msgspec.MsgspecError:
        return None
