"""The asker's end of an examination: prove the token, ask what the coordinator sees, have it dial back. No retries."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import AsyncGenerator
from http import HTTPStatus

import aiohttp
import msgspec

from atoll.addresses import split_addresses
from atoll.errors import AtollError, Unreachable
from atoll.membership import auth
from atoll.membership.examination import (
    CHALLENGE_BYTES,
    EXAMINATION_PATH,
    DialBack,
    DialedBack,
    Examined,
    ExamineMe,
    decode_answer,
    echo,
)
from atoll.membership.link import CLOSE_S, Secure, dial, open_http, phrase
from atoll.membership.operator_link import Conversation, NothingHeardError
from atoll.membership.register import Token, parse_token

REACH_S = 5.0
"""For one coordinator: to connect, prove the token and be told."""
DIAL_BACK_S = 4.0
MAPPING_S = 2.0
_ADDRESSES = 3
"""So many coordinators are tried; all that may lead are rarely more."""


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """What was told, and what was seen on the way.

    `address` is the coordinator's that answered, `coordinator_host` the IP address behind it, `own_host` this machine's
    on the way there. `ahead_s` is by how much the coordinator's clock is ahead of this one, `rtt_s` the round trip in
    which that was asked: it is known to half of it. `dialed` are the dial-backs, `mapped` the sources at which one port
    of this machine was seen from two ports of the coordinator; () if these were not reached.
    """

    address: str
    told: Examined
    coordinator_host: str
    own_host: str
    rtt_s: float
    ahead_s: float
    dialed: tuple[DialedBack, ...] = ()
    mapped: tuple[tuple[str, int], ...] = ()


async def examine(
    address: str, token: bytes, listener: socket.socket | None, secure: Secure | None = None
) -> Examination:
    """Have the coordinator at `address` (or those that may lead, separated by commas) examine this machine.

    With `secure` by TLS, as the holder of `token`, or of the certificate in there if there is no token. `listener` is
    bound where others are to reach this machine, with SO_REUSEPORT; the coordinator is asked to dial it, and it is
    closed at the end. Nothing is dialled if it is None, or not at this machine's address on the way to the coordinator,
    which dials no other. Takes at most REACH_S for each of the first few addresses, and
    MAPPING_S + 2 x DIAL_BACK_S. Raises ConfigError, Unreachable (with the reason of each), or Refused.
    """
    try:
        if secure is None:
            auth.check_token(token)
            who = Token("", token)
        else:
            who = parse_token(token) if token else Token("", secure.key)
        found = []
        addresses = split_addresses(address)[:_ADDRESSES]
        for each in addresses:
            try:
                return await _examine_at(each, who, secure, listener)
            except Unreachable as error:
                found.append(str(error))
        raise Unreachable("; ".join(found))
    finally:
        if listener is not None:
            listener.close()


async def _examine_at(
    address: str, who: Token, secure: Secure | None, listener: socket.socket | None
) -> Examination:
    until_s = asyncio.get_running_loop().time() + REACH_S
    http = open_http()
    try:
        async with asyncio.timeout_at(until_s):
            websocket = await dial(http, address, EXAMINATION_PATH, secure)
        try:
            return await _converse(address, who, websocket, listener, until_s)
        finally:
            with contextlib.suppress(TimeoutError, OSError):  # it was heard, or it is gone
                await asyncio.wait_for(websocket.close(), CLOSE_S)
    except NothingHeardError as why:
        raise _unreachable(address, str(why)) from None
    except aiohttp.WSServerHandshakeError as error:
        old = "; or its Atoll is one that examines nobody" if error.status == HTTPStatus.NOT_FOUND else ""
        raise _unreachable(address, phrase(error) + old) from None
    except TimeoutError:
        raise _unreachable(address, f"no answer in {REACH_S:g} s") from None
    except (OSError, aiohttp.ClientError) as error:
        raise _unreachable(address, phrase(error)) from None
    finally:
        await asyncio.wait_for(http.close(), CLOSE_S)


async def _converse(
    address: str,
    who: Token,
    websocket: aiohttp.ClientWebSocketResponse,
    listener: socket.socket | None,
    until_s: float,
) -> Examination:
    """Everything is told by `until_s` of the loop's clock; dialling back takes its time after that."""
    nonce, conversation = auth.new_nonce(), Conversation(websocket, decode_answer)
    async with asyncio.timeout_at(until_s):
        await conversation.prove(address, who)
        begun_s, asked_s = time.monotonic(), time.time()
        await conversation.say(ExamineMe(nonce))
        told = await conversation.expect(Examined, what="what it sees")
        rtt_s = time.monotonic() - begun_s
    examination = Examination(
        address=address,
        told=told,
        coordinator_host=str(websocket.get_extra_info("peername")[0]),
        own_host=str(websocket.get_extra_info("sockname")[0]),
        rtt_s=rtt_s,
        ahead_s=told.wall_time_s - asked_s - rtt_s / 2,
    )
    if listener is None or not _faces(listener, examination.own_host):
        return examination
    return await _dialed(examination, conversation, nonce, listener)


def _faces(listener: socket.socket, own_host: str) -> bool:
    """Whether who dials `own_host` comes to the listener."""
    bound, own = (
        ipaddress.ip_address(each.partition("%")[0]) for each in (listener.getsockname()[0], own_host)
    )
    if bound.is_unspecified:
        return bound.version == 6 or own.version == 4
    return bound == own


def _unreachable(address: str, why: str) -> Unreachable:
    return Unreachable(f"no coordinator at {address} ({why})")


async def _dialed(
    examination: Examination, conversation: Conversation, nonce: bytes, listener: socket.socket
) -> Examination:
    """With the sources at which the listener's port is seen, and what came of dialling it: as it is; and as it is seen,
    if that is one port for all."""
    own_port = listener.getsockname()[1]
    async with _answering(listener, nonce), _mapped(examination, own_port, nonce) as mapped:
        dialed, seen = [], {port for _, port in mapped}
        for port in {own_port: None, **(dict.fromkeys(seen) if len(seen) == 1 else {})}:
            try:
                async with asyncio.timeout(DIAL_BACK_S):
                    await conversation.say(DialBack(port))
                    dialed.append(await conversation.expect(DialedBack))
            except (TimeoutError, NothingHeardError, OSError, AtollError) as error:
                dialed.append(DialedBack(port, False, f"the coordinator did not tell ({error})"))
                break
    return msgspec.structs.replace(examination, dialed=tuple(dialed), mapped=tuple(mapped))


@contextlib.asynccontextmanager
async def _answering(listener: socket.socket, nonce: bytes) -> AsyncGenerator[None]:
    """Answer challenges on the listener, each connection one."""
    over, writers = False, list[asyncio.StreamWriter]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if over:  # accepted in the moment that all is closed
            writer.transport.abort()
            return
        writers.append(writer)
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(DIAL_BACK_S):
                writer.write(echo(nonce, await reader.readexactly(CHALLENGE_BYTES)))
                await writer.drain()
                writer.close()

    server = await asyncio.start_server(answer, sock=listener.dup(), limit=CHALLENGE_BYTES)
    try:
        yield
    finally:
        over = True
        server.close()
        for writer in writers:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def _mapped(
    examination: Examination, own_port: int, nonce: bytes
) -> AsyncGenerator[list[tuple[str, int]]]:
    """Connections from `own_port` to both of the coordinator's mapping ports, kept open meanwhile, and how each was
    seen; [] unless both were."""
    sockets: list[socket.socket] = []
    seen: list[tuple[str, int]] = []
    try:
        with contextlib.suppress(OSError, ValueError, TimeoutError):
            async with asyncio.timeout(MAPPING_S):
                for port in examination.told.mapping_ports:
                    sockets.append(_bound(examination.own_host, own_port))
                    seen.append(await _seen_at(sockets[-1], examination.coordinator_host, port, nonce))
        yield seen if len(seen) == 2 else []
    finally:
        for each in sockets:
            each.close()


def _bound(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setblocking(False)
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound


async def _seen_at(bound: socket.socket, host: str, port: int, nonce: bytes) -> tuple[str, int]:
    loop = asyncio.get_running_loop()
    await loop.sock_connect(bound, (host, port))
    await loop.sock_sendall(bound, nonce)
    line = b""
    while not line.endswith(b"\n"):
        part = await loop.sock_recv(bound, 128)
        if not part or len(line) > 128:
            raise OSError("it hung up")
        line += part
    seen_host, seen_port = line.decode().split()
    return seen_host, int(seen_port)
