"""An operator's end: reach the coordinator, prove the token both ways, ask one thing, hear the reply. No retries."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TypeVar

import aiohttp
import msgspec

from atoll import __version__
from atoll.errors import Refused, Unreachable
from atoll.membership import auth, messages, operator
from atoll.membership.frames import Assembler, OversizedError, pack
from atoll.membership.link import CLOSE_S, dial, open_http, phrase, split_address
from atoll.membership.messages import Challenge
from atoll.membership.operator import (
    OPERATOR_PATH,
    Done,
    OperatorConnect,
    OperatorWelcome,
    Reply,
    Request,
    StandingBy,
    Status,
    StatusWanted,
)

ASK_S = 10.0

M = TypeVar("M")


def ask_status(address: str, token: bytes) -> Status | StandingBy:
    """How the run of the coordinator at `address` ("host:port") stands, or that it stands by while another one leads.
    Blocks at most ASK_S and a little.

    Raises ConfigError, Unreachable or Refused, as `give_order`.
    """
    reply = asyncio.run(_ask(address, token, StatusWanted()))
    assert not isinstance(reply, Done)
    return reply


def give_order(address: str, token: bytes, request: Request) -> Done:
    """Have the coordinator decide about a request. Raises ConfigError for an address or token that cannot be right,
    Unreachable if no coordinator answers or this one stands by, Refused if it has another token or protocol.
    """
    reply = asyncio.run(_ask(address, token, request))
    if isinstance(reply, StandingBy):
        leads = f"{reply.leader} leads, so give the order there" if reply.leader else "nobody leads"
        raise Unreachable(f"the coordinator at {address} stands by, and decides nothing: {leads}")
    assert isinstance(reply, Done)
    return reply


async def _ask(address: str, token: bytes, request: Request) -> Reply:
    auth.check_token(token)
    split_address(address)
    http = open_http()
    try:
        async with asyncio.timeout(ASK_S):
            websocket = await dial(http, address, OPERATOR_PATH)
            try:
                conversation = _Conversation(websocket)
                await conversation.prove(address, token)
                await conversation.say(request)
                told = Status if isinstance(request, StatusWanted) else Done
                return await conversation.expect(told | StandingBy, what=f"a {told.__name__}")
            finally:
                with contextlib.suppress(TimeoutError, OSError):  # it was heard, or it is gone
                    await asyncio.wait_for(websocket.close(), CLOSE_S)
    except _NothingHeardError as why:
        raise _unreachable(address, str(why)) from None
    except TimeoutError:
        raise _unreachable(address, f"no answer in {ASK_S:g} s") from None
    except (OSError, aiohttp.ClientError) as error:
        raise _unreachable(address, phrase(error)) from None
    finally:
        await asyncio.wait_for(http.close(), CLOSE_S)


def _unreachable(address: str, why: str) -> Unreachable:
    return Unreachable(
        f"no coordinator at {address} ({why}); check the address, and whether the run is over already"
    )


class _NothingHeardError(Exception):
    """What answers does not speak like a coordinator; one short phrase."""


class _Conversation:
    def __init__(self, websocket: aiohttp.ClientWebSocketResponse) -> None:
        self._websocket = websocket
        self._assembler = Assembler()

    async def prove(self, address: str, token: bytes) -> None:
        challenge = await self.expect(Challenge)
        if challenge.protocol != messages.PROTOCOL:
            raise Refused(
                f"the coordinator at {address} speaks protocol {challenge.protocol}, this command "
                f"{messages.PROTOCOL}; use the coordinator's version of Atoll"
            )
        handshake = auth.OperatorHandshake(
            protocol=messages.PROTOCOL, server_nonce=challenge.nonce, client_nonce=auth.new_nonce()
        )
        await self.say(
            OperatorConnect(
                protocol=messages.PROTOCOL,
                package=__version__,
                nonce=handshake.client_nonce,
                proof=handshake.operator_proof(token),
            )
        )
        welcome = await self.expect(OperatorWelcome)
        if not handshake.coordinator_proof_fits(token, welcome.proof):
            raise Refused(
                f"the coordinator at {address} does not hold this run's token; check the address and the token"
            )

    async def say(self, message: messages.Message) -> None:
        for part in pack(message):
            await self._websocket.send_bytes(part)

    async def expect(self, kind: type[M], what: str = "") -> M:
        """The next message, if it is of this kind. Raises Refused with the coordinator's words."""
        message = await self._hear()
        if isinstance(message, messages.Refused):
            raise Refused(message.reason)
        if not isinstance(message, kind):
            said = "closed the connection" if message is None else f"sent {type(message).__name__}"
            raise _NothingHeardError(f"it {said} instead of {what or f'a {kind.__name__}'}")
        return message

    async def _hear(self) -> object | None:
        """The next whole message; None when the connection is over, or no longer making sense."""
        while True:
            frame = await self._websocket.receive()
            if frame.type is not aiohttp.WSMsgType.BINARY:
                return None
            try:
                whole = self._assembler.feed(frame.data)
                if whole is not None:
                    return operator.decode_reply(whole)
            except (OversizedError, msgspec.MsgspecError):
                return None
