"""One connection to a donor's sidecar: ask with proof, check the proof of the reply, read what was announced.

Runs on the fetch thread's event loop. Nothing is read that the request did not ask for, redirects are not followed, and
a silence of `silence_s` is a failure.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Final

import aiohttp
from yarl import URL

from atoll.membership.link import Resolver
from atoll.network.authority import peer_name
from atoll.recovery import proof
from atoll.recovery.pace import Pace
from atoll.recovery.targets import Source
from atoll.state.manifest import Span

MAX_SMALL_BYTES: Final = 16 << 20
_READ_BYTES = 256 << 10

OnData = Callable[[bytes], None]


class SourceFailedError(Exception):
    """It cannot be reached, or answers as no donor of this run does. As a phrase; trying again may help."""


class SourceLacksError(Exception):
    """It is well, and does not have this (any more)."""


class SourceLiedError(Exception):
    """What it gave is not what it should be. As a phrase."""


class SourceLink:
    """Keeps one connection open between requests. One request at a time."""

    def __init__(
        self,
        source: Source,
        *,
        run: str,
        session_key: Callable[[], bytes],
        silence_s: float,
        pace: Pace,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """With `tls` the source has to show a certificate with its peer's name."""
        self._source, self._run, self._session_key, self._pace = source, run, session_key, pace
        self._tls = tls
        self._nonce = bytes(proof.NONCE_BYTES)  # the first answer tells the right one
        self._count = 0
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                resolver=Resolver(), use_dns_cache=False, limit=1, keepalive_timeout=30
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=silence_s, sock_read=silence_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=_READ_BYTES,
        )

    async def get_small(self, path: str) -> bytes:
        """A listing, a manifest or the head of an update. Raises SourceFailedError or SourceLacksError."""
        return await self._get(path, None, None)

    async def get_span(self, span: Span, on_data: OnData) -> None:
        """Part of a file, handed to `on_data` as it comes. Raises SourceFailedError or SourceLacksError."""
        await self._get(span.file, span, on_data)

    async def close(self) -> None:
        await self._http.close()

    async def _get(self, path: str, span: Span | None, on_data: OnData | None) -> bytes:
        try:
            for _ in range(2):  # the first request on a connection learns its nonce
                body = await self._ask(path, span, on_data)
                if body is not None:
                    return body
        except (OSError, aiohttp.ClientError) as error:
            raise SourceFailedError(_phrase(error)) from None
        raise SourceFailedError("it does not know this run's session key")

    async def _ask(self, path: str, span: Span | None, on_data: OnData | None) -> bytes | None:
        """None if the request has to be proved anew."""
        key = self._session_key()
        self._count += 1
        asked = proof.Request(
            run=self._run,
            donor=self._source.peer,
            method="GET",
            target=f"/v1/{path}",
            byte_range=f"bytes={span.offset}-{span.offset + span.size_bytes - 1}" if span else "",
            server_nonce=self._nonce,
            client_nonce=proof.new_nonce(),
            count=self._count,
        )
        url = URL.build(
            scheme="https" if self._tls else "http",
            host=self._source.host,
            port=self._source.port,
            path=asked.target,
            encoded=True,
        )
        headers = {"Authorization": asked.credentials(key)}
        if asked.byte_range:
            headers["Range"] = asked.byte_range
        async with self._http.get(
            url,
            headers=headers,
            allow_redirects=False,
            ssl=self._tls or True,
            server_hostname=peer_name(self._source.peer) if self._tls else None,
        ) as response:
            if response.status == 401:
                nonce = proof.parse_challenge(response.headers.get("WWW-Authenticate", ""))
                if nonce is None:
                    raise SourceFailedError("it is no sidecar")
                self._nonce = nonce
                return None
            given = response.headers.get(proof.REPLY_HEADER, "")
            if span is not None and response.status == 206:
                assert on_data is not None
                if not asked.reply_fits(key, given, 206, span.size_bytes, None):
                    raise SourceFailedError("its answer is not proved")
                await self._read(response, span.size_bytes, on_data)
                return b""
            return await self._read_small(response, asked, key, given)

    async def _read_small(
        self, response: aiohttp.ClientResponse, asked: proof.Request, key: bytes, given: str
    ) -> bytes:
        """The body, which the reply's proof covers. An error's is empty."""
        size = response.content_length
        if size is None or size > MAX_SMALL_BYTES:
            raise SourceFailedError(f"it answers with {size} bytes")
        body = bytearray()
        await self._read(response, size, body.extend)
        if not asked.reply_fits(key, given, response.status, size, bytes(body)):
            raise SourceFailedError("its answer is not proved")
        if response.status == 404:
            raise SourceLacksError
        if response.status != 200 or asked.byte_range:
            raise SourceFailedError(f"it answers {response.status}")
        return bytes(body)

    async def _read(self, response: aiohttp.ClientResponse, size: int, on_data: OnData) -> None:
        got = 0
        while got < size:
            data = await response.content.read(self._pace.at_once())
            got += len(data)
            if not data or got > size:
                raise SourceFailedError(f"it ended after {got} of {size} bytes")
            await self._pace.take(len(data))
            on_data(data)


def _phrase(error: Exception) -> str:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(error, TimeoutError):
        return "it is silent"
    if isinstance(cause, ConnectionRefusedError):
        return "connection refused"
    return (getattr(cause, "strerror", None) or str(cause) or type(cause).__name__).lower()
