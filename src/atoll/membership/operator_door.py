"""The coordinator's end of operators' connections: proof, one request, one reply, and it is closed.

Runs on the coordinator's event loop. A status is read off the state; everything else is decided by the machine, whose
answer comes back under the request's ticket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import msgspec
from aiohttp import WSMsgType, web

from atoll.membership import auth, gate, messages, operator
from atoll.membership.frames import pack
from atoll.membership.messages import Challenge, Refused
from atoll.membership.operator import (
    Done,
    EvictPeer,
    LeavePeer,
    OperatorConnect,
    OperatorWelcome,
    Reply,
    Request,
    RunSettings,
    SettingsWanted,
    Status,
    StatusWanted,
    StopRun,
    VpnAnnounce,
)
from atoll.membership.register import Register, Unknown
from atoll.membership.registrar import Holder, Registrar
from atoll.membership.steps import OperatorSaid

ANSWER_S = 5.0


class OperatorDoor:
    """Lets operators in, and takes what they ask to the machine or the registrar. `hear` puts an event before it;
    `vpn(said, host)` answers a peer's VPN, which comes from `host`."""

    def __init__(
        self,
        register: Register,
        registrar: Registrar,
        strangers: gate.Gate,
        *,
        tls: bool,
        status: Callable[[], Status],
        settings: Callable[[], dict[str, Any] | None],
        hear: Callable[[OperatorSaid], Awaitable[None]],
        vpn: Callable[[VpnAnnounce, str], Reply],
    ) -> None:
        self._register, self._registrar = register, registrar
        self._gate, self._tls = strangers, tls
        self._status, self._settings = status, settings
        self._hear = hear
        self._vpn = vpn
        self._tickets = count(1)
        self._waiting: dict[int, asyncio.Future[Done]] = {}

    def answer(self, ticket: int, reply: Done) -> None:
        """What the machine decided about a request. One who has gone hears nothing."""
        waiting = self._waiting.get(ticket)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    async def attend(self, websocket: web.WebSocketResponse, transport: asyncio.Transport | None) -> None:
        """One connection from its first byte to its last."""
        host = gate.address_of(transport)
        await attend_operator(
            websocket,
            transport,
            self._register,
            self._gate,
            lambda who, request: self._reply(who, request, host),
            tls=self._tls,
        )

    async def _reply(self, who: Holder, request: Request, host: str) -> Reply:
        self._registrar.check(who, request)
        match request:
            case StatusWanted():
                return self._status()
            case SettingsWanted():
                return RunSettings(self._settings())
            case StopRun() | LeavePeer() | EvictPeer():
                return await self._decide(request)
            case VpnAnnounce():
                return self._vpn(request, host)
            case _:
                return self._registrar.reply(who, request)

    async def _decide(self, request: StopRun | LeavePeer | EvictPeer) -> Done:
        ticket = next(self._tickets)
        self._waiting[ticket] = asyncio.get_running_loop().create_future()
        # Without TLS a new session key could not be told to anybody without telling everybody.
        spare_key = auth.new_session_key() if self._tls else b""
        try:
            certified = isinstance(request, EvictPeer) and self._register.knows(request.peer)
            await self._hear(OperatorSaid(ticket, request, spare_key, certified))
            return await self._waiting[ticket]
        finally:
            del self._waiting[ticket]


async def attend_operator(
    websocket: web.WebSocketResponse,
    transport: asyncio.Transport | None,
    register: Register,
    strangers: gate.Gate,
    reply: Callable[[Holder, Request], Awaitable[Reply]],
    *,
    tls: bool,
) -> None:
    """Let an operator prove its token, or with `tls` a peer its certificate, and answer its one request."""
    proven = await prove_operator(websocket, transport, register, tls=tls)
    if not isinstance(proven, tuple):
        await strangers.turn_away(websocket, transport, proven)
        return
    if transport is None:
        return
    who, proof = proven
    strangers.proved(transport)
    try:
        async with asyncio.timeout(ANSWER_S):
            await websocket.send_bytes(messages.encode(OperatorWelcome(proof=proof)))
            request = await _receive(websocket)
            if request is not None and not isinstance(request, OperatorConnect):
                for part in pack(await _answer(reply, who, request)):
                    await websocket.send_bytes(part)
            await websocket.close()
    except TimeoutError:
        transport.abort()


async def _answer(
    reply: Callable[[Holder, Request], Awaitable[Reply]], who: Holder, request: Request
) -> Reply | Refused:
    try:
        return await reply(who, request)
    except Unknown as unknown:
        return Refused("token", unknown.reason)


async def prove_operator(
    websocket: web.WebSocketResponse, transport: asyncio.Transport | None, register: Register, *, tls: bool
) -> tuple[Holder, bytes] | Refused | None:
    """Challenge a stranger. Returns who it is and the proof for it, or what to refuse it with; None for nonsense."""
    nonce = auth.new_nonce()
    await websocket.send_bytes(messages.encode(Challenge(protocol=messages.PROTOCOL, nonce=nonce)))
    connect = await _receive(websocket)
    if not isinstance(connect, OperatorConnect):
        return None
    if connect.protocol != messages.PROTOCOL:
        return Refused(
            "protocol",
            f"this command speaks protocol {connect.protocol} (Atoll {connect.package[:32]!r}), the coordinator "
            f"{messages.PROTOCOL}; use the coordinator's version of Atoll",
        )
    handshake = auth.OperatorHandshake(
        protocol=connect.protocol, server_nonce=nonce, client_nonce=connect.nonce
    )
    try:
        if tls and not connect.token:
            der, serial = gate.certificate_of(transport)
            known = register.certificate(serial)
            who, key = Holder(known.token, known.peer, serial), auth.certificate_key(der)
        else:
            who, key = Holder(connect.token), register.key_of(connect.token)
    except Unknown as unknown:
        return Refused("token", unknown.reason)
    if not handshake.operator_proof_fits(key, connect.proof):
        return Refused(
            "token", "the run token does not fit; give this command the token of the run (ATOLL_TOKEN)"
        )
    return who, handshake.coordinator_proof(key)


async def _receive(websocket: web.WebSocketResponse) -> OperatorConnect | Request | None:
    """One message, or None for anything else."""
    frame = await websocket.receive()
    if frame.type is not WSMsgType.BINARY:
        return None
    try:
        return operator.decode_from_operator(frame.data)
    except msgspec.MsgspecError:
        return None
