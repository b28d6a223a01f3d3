"""A peer's connection to the coordinator: reach it, prove the token both ways, then exchange messages.

Runs on the event loop of whoever opens it (`membership.client` owns that thread). Nothing here retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from typing import Any

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from atoll import __version__
from atoll.addresses import split_address
from atoll.errors import Refused
from atoll.membership import auth, messages
from atoll.membership.frames import PART_BYTES, Assembler, OversizedError, pack
from atoll.membership.messages import Challenge, Connect, CoordinatorMessage, Message, Welcome
from atoll.membership.settings import Timeouts

PATH = "/v1/peer"
STANDING_BY = 503  # the HTTP status of a coordinator that does not lead: try the next
CLOSE_S = 1.0


class NotReachedError(Exception):
    """No coordinator answered, as one short phrase; trying again may help."""


class Secure(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a coordinator by TLS: `context` holds whom to believe, and the own certificate if there is one,
    `server_name` is the name in the coordinator's certificate. `key` stands for the own certificate in proofs."""

    context: ssl.SSLContext
    server_name: str
    key: bytes = b""

    def __repr__(self) -> str:
        return f"Secure({self.server_name})"


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """Who connects, where to, and the token that proves it. `repr` shows no token.

    `address` is one coordinator's for a link; as a user gives it, it may name several, separated by commas. With
    `secure` the certificate in there is the proof, and there is no token.
    """

    address: str
    run: str
    peer: str
    incarnation: str
    token: bytes
    secure: Secure | None = None

    @property
    def key(self) -> bytes:
        """What the proofs of this peer are made with."""
        return self.secure.key if self.secure is not None else self.token

    def __repr__(self) -> str:
        return f"Credentials({self.peer} of {self.run} to {self.address})"


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer receives that proved the token. `seen_as` is its address as the coordinator sees it."""

    settings: dict[str, Any] | None
    timeouts: Timeouts
    session_key: bytes
    term: int
    seen_as: str
    renew_s: float = 0.0

    def __repr__(self) -> str:
        return f"Admission(term {self.term}, seen as {self.seen_as})"


class _WebSocket(aiohttp.ClientWebSocketResponse):
    """Gives its connection back however it ends; aiohttp's own keeps it once the other side was cut off. All is said by
    then: TLS need not wait for the other end's goodbye, for which the event loop may not live long enough."""

    async def close(self, *, code: int = aiohttp.WSCloseCode.OK, message: bytes = b"") -> bool:
        connection = self._response.connection
        transport = connection.transport if connection is not None else None
        try:
            return await super().close(code=code, message=message)
        finally:
            self._response.close()
            if transport is not None and _is_tls(transport):
                transport.abort()
                await asyncio.sleep(0)


def _is_tls(transport: asyncio.Transport) -> bool:
    try:
        return transport.get_extra_info("ssl_object") is not None
    except AttributeError:  # asyncio's own, of a TLS connection that is over already
        return False


class Link:
    """One connection that is proven both ways. One task sends, one receives."""

    def __init__(self, http: aiohttp.ClientSession, websocket: aiohttp.ClientWebSocketResponse) -> None:
        self._http = http
        self._websocket = websocket
        self._assembler = Assembler()
        self._admission: Admission | None = None

    @property
    def admission(self) -> Admission:
        assert self._admission is not None, "the link is proven before anyone else sees it"
        return self._admission

    async def send(self, message: Message) -> None:
        """Returns when the socket's buffer has taken it. Raises OSError once the connection is gone."""
        for part in pack(message):
            await self._websocket.send_bytes(part)

    async def receive(self) -> CoordinatorMessage | None:
        """The next message, or None when the connection is over (closed, or no longer making sense)."""
        while True:
            frame = await self._websocket.receive()
            if frame.type is not aiohttp.WSMsgType.BINARY:
                return None
            try:
                whole = self._assembler.feed(frame.data)
                if whole is not None:
                    return messages.decode_from_coordinator(whole)
            except (OversizedError, msgspec.MsgspecError):
                return None

    async def close(self) -> None:
        """Say goodbye to the socket, for at most CLOSE_S."""
        try:
            await asyncio.wait_for(self._websocket.close(), CLOSE_S)
        except (TimeoutError, OSError):
            pass  # the other side is gone; the transport goes with the session
        finally:
            await self._http.close()

    async def prove(self, credentials: Credentials) -> None:
        """Raises Refused, or NotReachedError if what answers does not speak like a coordinator."""
        challenge = await self._expect(Challenge)
        if challenge.protocol != messages.PROTOCOL:
            raise Refused(
                f"the coordinator at {credentials.address} speaks protocol {challenge.protocol}, this peer "
                f"{messages.PROTOCOL}; install the same version of Atoll on both"
            )
        handshake = auth.Handshake(
            protocol=messages.PROTOCOL,
            run=credentials.run,
            peer=credentials.peer,
            incarnation=credentials.incarnation,
            server_nonce=challenge.nonce,
            client_nonce=auth.new_nonce(),
        )
        await self.send(_connect(handshake, credentials.key))
        welcome = await self._expect(Welcome)
        if not handshake.coordinator_proof_fits(credentials.key, welcome.sealed_session_key, welcome.proof):
            raise Refused(
                f"the coordinator at {credentials.address} does not hold this run's token; "
                "check the address and the token"
            )
        self._admission = Admission(
            settings=welcome.settings,
            timeouts=msgspec.convert(welcome.timeouts, Timeouts),
            session_key=handshake.unseal(credentials.key, welcome.sealed_session_key),
            term=welcome.term,
            seen_as=welcome.seen_as,
            renew_s=welcome.renew_s,
        )

    async def _expect(self, kind: type[Any]) -> Any:
        message = await self.receive()
        if isinstance(message, messages.Refused):
            raise Refused(message.reason)
        if not isinstance(message, kind):
            said = "closed the connection" if message is None else f"sent {type(message).__name__}"
            raise NotReachedError(f"it {said} instead of a {kind.__name__}")
        return message


async def open_link(credentials: Credentials, timeout_s: float) -> Link:
    """Connect and prove the token both ways within `timeout_s`. Raises NotReachedError or Refused."""
    http = open_http()
    try:
        async with asyncio.timeout(timeout_s):
            websocket = await dial(http, credentials.address, PATH, credentials.secure)
            link = Link(http, websocket)
            try:
                await link.prove(credentials)
            except BaseException:
                await link.close()
                raise
            return link
    except TimeoutError:
        await http.close()
        raise NotReachedError(f"no answer in {timeout_s:.3g} s") from None
    except (OSError, aiohttp.ClientError) as error:
        await http.close()
        raise NotReachedError(phrase(error)) from None
    except BaseException:
        await http.close()
        raise


def open_http() -> aiohttp.ClientSession:
    """To be closed by the caller. Name look-ups cannot hold up the exit, and no connection is kept."""
    connector = aiohttp.TCPConnector(resolver=Resolver(), use_dns_cache=False, force_close=True)
    return aiohttp.ClientSession(connector=connector, ws_response_class=_WebSocket)


async def dial(
    http: aiohttp.ClientSession, address: str, path: str, secure: Secure | None = None
) -> aiohttp.ClientWebSocketResponse:
    """A WebSocket to the coordinator's `path`; with `secure` it has proved itself, without nothing is proved. Raises
    OSError or aiohttp.ClientError; see `phrase`."""
    host, port = split_address(address)
    url = URL.build(scheme="https" if secure else "http", host=host, port=port, path=path)
    if secure is None:
        return await http.ws_connect(url, max_msg_size=PART_BYTES + 1, compress=0)
    return await http.ws_connect(
        url,
        max_msg_size=PART_BYTES + 1,
        compress=0,
        ssl=secure.context,
        server_hostname=secure.server_name,
    )


def _connect(handshake: auth.Handshake, token: bytes) -> Connect:
    return Connect(
        protocol=handshake.protocol,
        package=__version__,
        run=handshake.run,
        peer=handshake.peer,
        incarnation=handshake.incarnation,
        nonce=handshake.client_nonce,
        proof=handshake.peer_proof(token),
    )


def phrase(error: Exception) -> str:
    """Why nothing was reached, in a few words."""
    if isinstance(error, aiohttp.WSServerHandshakeError):
        if error.status == STANDING_BY:
            return "it stands by: another coordinator leads"
        return f"it is no coordinator: it answered HTTP {error.status}"
    if tls := _tls_phrase(error):
        return tls
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, ConnectionRefusedError):
        return "connection refused"
    return (getattr(cause, "strerror", None) or str(cause) or type(cause).__name__).lower()


def _tls_phrase(error: Exception) -> str:
    """What went wrong with TLS, in words that say what to do; "" if it was something else."""
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return (
            "it closed the connection; if the run has an authority, its fingerprint is needed (--authority)"
        )
    inner = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
    if isinstance(inner, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not the coordinator's of this run ({inner.verify_message or inner.reason}): somebody "
            "may be in between, or the address is another run's"
        )
    if isinstance(inner, ssl.SSLError):
        reason = (inner.reason or str(inner)).lower().replace("_", " ")
        if "wrong version number" in reason or "record layer failure" in reason:
            return "it does not speak TLS: this run's coordinator was started without an authority"
        return f"TLS: {reason}"
    return ""


class Resolver(AbstractResolver):
    """Looks names up on a short-lived daemon thread, so that a hanging name server cannot hold up our exit.

    The event loop's own executor is joined when the interpreter ends, however long a look-up takes.
    """

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[list[Any]] = loop.create_future()

        def settle(infos: list[Any], error: OSError | None) -> None:
            if found.done():
                return  # the caller gave up
            if error is None:
                found.set_result(infos)
            else:
                found.set_exception(error)

        def look_up() -> None:
            infos, error = [], None
            try:
                infos = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
            except OSError as failure:
                error = failure
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, infos, error)

        threading.Thread(target=look_up, name="atoll-resolve", daemon=True).start()
        return [
            ResolveResult(
                hostname=host,
                host=where[0],
                port=where[1],
                family=found_family,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for found_family, _, _, _, where in await found
        ]

    async def close(self) -> None:
        pass
