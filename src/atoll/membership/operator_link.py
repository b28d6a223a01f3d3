"""An operator's end: reach the coordinator, prove the token both ways, ask one thing, hear the reply. No retries."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final, TypeVar

import aiohttp
import msgspec

from atoll import __version__
from atoll.addresses import split_addresses
from atoll.errors import Refused, Unreachable
from atoll.membership import auth, messages, operator
from atoll.membership.frames import Assembler, OversizedError, pack
from atoll.membership.link import CLOSE_S, Secure, dial, open_http, phrase, split_address
from atoll.membership.messages import Challenge
from atoll.membership.operator import (
    OPERATOR_PATH,
    Done,
    Enrol,
    Enrolled,
    MakeToken,
    OperatorConnect,
    OperatorWelcome,
    Reply,
    Request,
    RunSettings,
    SettingsWanted,
    StandingBy,
    Status,
    StatusWanted,
    Tokens,
    TokensWanted,
    TokenText,
    VpnAnnounce,
    VpnMesh,
)
from atoll.membership.register import Token, parse_token

ASK_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0

M = TypeVar("M")


def ask_status(address: str, token: bytes, secure: Secure | None = None) -> Status | StandingBy:
    """How the run of the coordinator at `address` ("host:port") stands, or that it stands by while another one leads.
    Blocks at most ASK_S and a little.

    Raises ConfigError, Unreachable or Refused, as `give_order`.
    """
    reply = asyncio.run(ask(address, token, StatusWanted(), secure))
    assert isinstance(reply, Status | StandingBy)
    return reply


def give_order(address: str, token: bytes, request: Request, secure: Secure | None = None) -> Done:
    """Have the coordinator decide about a request. Raises ConfigError for an address or token that cannot be right,
    Unreachable if no coordinator answers or this one stands by, Refused if it has another token or protocol.
    """
    reply = asyncio.run(decided(address, token, request, secure))
    assert isinstance(reply, Done)
    return reply


async def announce_vpn(
    address: str, token: bytes, said: VpnAnnounce, secure: Secure | None = None
) -> VpnMesh | Done:
    """Tell the coordinator of this peer's VPN, and hear of the others'; Done for a goodbye.

    Raises ConfigError, Unreachable or Refused, as `give_order`; Refused also for an announcement that it does not take.
    """
    reply = await decided(address, token, said, secure)
    assert isinstance(reply, VpnMesh | Done)
    if isinstance(reply, Done) and not reply.ok:
        raise Refused(reply.reason)
    return reply


async def decided(address: str, token: bytes, request: Request, secure: Secure | None = None) -> Reply:
    """The reply of a coordinator that leads. Raises as `give_order`."""
    reply = await ask(address, token, request, secure)
    if isinstance(reply, StandingBy):
        leads = f"{reply.leader} leads, so give the order there" if reply.leader else "nobody leads"
        raise Unreachable(f"the coordinator at {address} stands by, and decides nothing: {leads}")
    return reply


def ask_leader(
    addresses: str, token: bytes, request: Request, secure: Secure | None = None, *, wait_s: float = 0.0
) -> Reply:
    """Ask whichever of these coordinators leads (separated by commas). Blocks at most `max(ASK_S, wait_s)` and a
    little: `wait_s` waits for one that is not up yet.

    Raises Refused if one refuses and none replies, Unreachable if none does, ConfigError as `give_order`.
    """
    places, within_s = split_addresses(addresses), max(ASK_S, wait_s)
    deadline_s, pause_s = time.monotonic() + within_s, _FIRST_PAUSE_S
    while True:
        missed, refused = [], []
        for place in places:
            at = f"{place}: " if len(places) > 1 else ""
            try:
                return asyncio.run(decided(place, token, request, secure))
            except Unreachable as why:
                missed.append(f"{at}{_reason(why)}")
            except Refused as refusal:
                refused.append(f"{at}{refusal}")
        ends = time.monotonic() + pause_s >= deadline_s
        if refused and (ends or not missed):  # one that stands by may not know a token that the leader made
            raise Refused("; ".join(refused))
        if ends:
            raise Unreachable(
                f"no coordinator at {', '.join(places)} in {within_s:.3g} s ({'; '.join(missed)}); start one with "
                "`atoll coordinator`, check the address, or start before it with --wait"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _reason(error: Unreachable) -> str:
    """What is in the brackets of `_unreachable`, or all of it."""
    cause = error.__cause__
    return str(cause) if isinstance(cause, NothingHeardError) else str(error)


_REPLIES: Final[dict[type[Request], type[Reply]]] = {
    StatusWanted: Status,
    SettingsWanted: RunSettings,
    Enrol: Enrolled,
    MakeToken: TokenText,
    TokensWanted: Tokens,
    VpnAnnounce: VpnMesh,
}


async def ask(address: str, token: bytes, request: Request, secure: Secure | None = None) -> Reply:
    """One request and its reply, within ASK_S. With `secure` by TLS, as the holder of `token`, or of the certificate in
    there if there is no token. Raises as `give_order`."""
    if secure is None:
        auth.check_token(token)
        who = Token("", token)
    else:
        who = parse_token(token) if token else Token("", secure.key)
    split_address(address)
    http = open_http()
    try:
        async with asyncio.timeout(ASK_S):
            websocket = await dial(http, address, OPERATOR_PATH, secure)
            try:
                conversation = Conversation(websocket)
                await conversation.prove(address, who)
                await conversation.say(request)
                told = _REPLIES.get(type(request), Done)
                return await conversation.expect(told | Done | StandingBy, what=f"a {told.__name__}")
            finally:
                with contextlib.suppress(TimeoutError, OSError):  # it was heard, or it is gone
                    await asyncio.wait_for(websocket.close(), CLOSE_S)
    except NothingHeardError as why:
        raise _unreachable(address, why) from why
    except TimeoutError:
        why = NothingHeardError(f"no answer in {ASK_S:g} s")
        raise _unreachable(address, why) from why
    except (OSError, aiohttp.ClientError) as error:
        why = NothingHeardError(phrase(error))
        raise _unreachable(address, why) from why
    finally:
        await asyncio.wait_for(http.close(), CLOSE_S)


def _unreachable(address: str, why: NothingHeardError) -> Unreachable:
    return Unreachable(
        f"no coordinator at {address} ({why}); check the address, and whether the run is over already"
    )


class NothingHeardError(Exception):
    """What answers does not speak like a coordinator; one short phrase."""


class Conversation:
    """Messages over a WebSocket that was dialled; `decode` reads what the coordinator says at its path."""

    def __init__(
        self,
        websocket: aiohttp.ClientWebSocketResponse,
        decode: Callable[[bytes], object] = operator.decode_reply,
    ) -> None:
        self._websocket = websocket
        self._decode = decode
        self._assembler = Assembler()

    async def prove(self, address: str, who: Token) -> None:
        """Both ways. Raises Refused for another token or protocol."""
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
                proof=handshake.operator_proof(who.key),
                token=who.id,
            )
        )
        welcome = await self.expect(OperatorWelcome)
        if not handshake.coordinator_proof_fits(who.key, welcome.proof):
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
            raise NothingHeardError(f"it {said} instead of {what or f'a {kind.__name__}'}")
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
                    return self._decode(whole)
            except (OversizedError, msgspec.MsgspecError):
                return None
