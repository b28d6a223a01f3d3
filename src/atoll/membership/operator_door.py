"""The coordinator's end of operators' connections: proof, one request, one reply, and it is closed.

Runs on the coordinator's event loop. A status is read off the state; everything else is decided by the machine, whose
answer comes back under the request's ticket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count

import msgspec
from aiohttp import WSMsgType, web

from atoll.membership import auth, gate, messages, operator
from atoll.membership.frames import pack
from atoll.membership.messages import Challenge, Refused
from atoll.membership.operator import (
    Done,
    OperatorConnect,
    OperatorWelcome,
    Reply,
    Request,
    Status,
    StatusWanted,
)
from atoll.membership.steps import OperatorSaid

ANSWER_S = 5.0


class OperatorDoor:
    """Lets operators in, and takes what they ask to the machine. `hear` puts an event before it."""

    def __init__(
        self,
        token: bytes,
        strangers: gate.Gate,
        *,
        status: Callable[[], Status],
        hear: Callable[[OperatorSaid], Awaitable[None]],
    ) -> None:
        self._token = token
        self._gate = strangers
        self._status = status
        self._hear = hear
        self._tickets = count(1)
        self._waiting: dict[int, asyncio.Future[Done]] = {}

    def answer(self, ticket: int, reply: Done) -> None:
        """What the machine decided about a request. One who has gone hears nothing."""
        waiting = self._waiting.get(ticket)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    async def attend(self, websocket: web.WebSocketResponse, transport: asyncio.Transport | None) -> None:
        """One connection from its first byte to its last."""
        await attend_operator(websocket, transport, self._token, self._gate, self._reply)

    async def _reply(self, request: Request) -> Reply:
        if isinstance(request, StatusWanted):
            return self._status()
        ticket = next(self._tickets)
        self._waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            await self._hear(OperatorSaid(ticket, request))
            return await self._waiting[ticket]
        finally:
            del self._waiting[ticket]


async def attend_operator(
    websocket: web.WebSocketResponse,
    transport: asyncio.Transport | None,
    token: bytes,
    strangers: gate.Gate,
    reply: Callable[[Request], Awaitable[Reply]],
) -> None:
    """Let an operator prove the token, and answer its one request."""
    proven = await _prove(websocket, token)
    if not isinstance(proven, auth.OperatorHandshake):
        await strangers.turn_away(websocket, transport, proven)
        return
    if transport is None:
        return
    strangers.proved(transport)
    try:
        async with asyncio.timeout(ANSWER_S):
            welcome = OperatorWelcome(proof=proven.coordinator_proof(token))
            await websocket.send_bytes(messages.encode(welcome))
            request = await _receive(websocket)
            if request is not None and not isinstance(request, OperatorConnect):
                for part in pack(await reply(request)):
                    await websocket.send_bytes(part)
            await websocket.close()
    except TimeoutError:
        transport.abort()


async def _prove(websocket: web.WebSocketResponse, token: bytes) -> auth.OperatorHandshake | Refused | None:
    """Challenge a stranger. Returns the proven handshake, or what to refuse it with; None for nonsense."""
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
    if not handshake.operator_proof_fits(token, connect.proof):
        return Refused(
            "token", "the run token does not fit; give this command the token of the run (ATOLL_TOKEN)"
        )
    return handshake


async def _receive(websocket: web.WebSocketResponse) -> OperatorConnect | Request | None:
    """One message, or None for anything else."""
    frame = await websocket.receive()
    if frame.type is not WSMsgType.BINARY:
        return None
    try:
        return operator.decode_from_operator(frame.data)
    except msgspec.MsgspecError:
        return None
