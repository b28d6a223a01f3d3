"""The sidecar's server: proof first, then ranges of files at a bounded rate. One event loop, no threads.

A stranger gets 401 whatever it asks, and has the limits of `membership.gate`: so many at once, a few seconds each, the
oldest goes first. Who has proved the session key gets files, read-only. Connections, request sizes and bytes per second
are bounded; a reader that does not take its bytes is cut off.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
from aiohttp import web

from atoll import log
from atoll.membership.gate import Gate, admit_connections
from atoll.network.authority import Identity
from atoll.network.tls import server_context
from atoll.recovery import proof
from atoll.recovery.folder import YIELD
from atoll.recovery.held import Held, look_up
from atoll.recovery.pace import Pace
from atoll.recovery.sidecar.files import BadRangeError, NotThereError, Opened, listing_after, open_part
from atoll.recovery.sidecar.orders import Order, Settings

MAX_PEERS: Final = 128
"""Connections that have proved the key; when one more comes, the one that was idle longest goes."""
FLOOR_BYTES_PER_S: Final = float(512 << 10)
FLOOR_SHARE: Final = 0.05
"""While a round moves bytes: this share of the cap, or FLOOR_BYTES_PER_S where there is no cap."""
QUIET_S: Final = 1.0
QUIET_BYTES_PER_S: Final = float(64 << 10)
"""A round that is over sooner has the line nearly to itself: those who fetch lose little by it."""

_MAX_LINE_BYTES = 1024
_MAX_FAILED_PROOFS = 3
_IDLE_S = 60.0
_STUCK_S = 30.0
_NOT_SENT_BYTES = 128 << 10
_TCP_NOTSENT_LOWAT = 25  # socket.TCP_NOTSENT_LOWAT, which Python names from 3.12 on

_log = log.get(__name__)


@dataclass(slots=True)
class _Connection:
    """What one connection has proved so far."""

    nonce: bytes = field(default_factory=proof.new_nonce)
    count: int = -1
    failed_proofs: int = 0
    proved: bool = False
    busy: bool = False
    idle_since_s: float = 0.0


def _tls_of(settings: Settings) -> ssl.SSLContext | None:
    if not settings.certificate:
        return None
    identity = Identity(settings.certificate, settings.key, settings.authority)
    return server_context(identity, strangers=False)


class Server:
    """Serves one staging folder to holders of the session key."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._key = bytes.fromhex(settings.session_key)
        self._folder: Path | None = None
        self._flag: BinaryIO | None = None
        if settings.folder:
            self._move(Path(settings.folder))
        self._moving_since_s: float | None = None
        self._gate = Gate(_tls_of(settings))
        self._pace = Pace(self._bytes_per_s)
        self._connections: weakref.WeakKeyDictionary[asyncio.BaseTransport, _Connection] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def folder(self) -> Path | None:
        return self._folder

    def obey(self, order: Order) -> None:
        if order.session_key is not None:
            self._key = bytes.fromhex(order.session_key)
            for transport, how in list(self._connections.items()):
                if how.proved and isinstance(transport, asyncio.Transport):
                    transport.abort()  # who still takes part proves the new key
        if order.folder is not None:
            self._move(Path(order.folder))

    async def run(self, listeners: list[socket.socket]) -> None:
        """Serve until cancelled."""
        # A private logger: aiohttp would write a line for every stranger that sends nonsense.
        quiet = logging.Logger("atoll.recovery.http", logging.CRITICAL + 1)
        http = web.Server(
            self._handle,
            access_log=None,
            logger=quiet,
            keepalive_timeout=_IDLE_S,
            lingering_time=0,
            max_line_size=_MAX_LINE_BYTES,
            max_field_size=_MAX_LINE_BYTES,
        )
        try:
            await asyncio.gather(*(admit_connections(each, self._gate, http) for each in listeners))
        finally:
            self._gate.close()
            await http.shutdown(timeout=0.1)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError
        connection = self._connections.setdefault(transport, _Connection())
        asked = self._prove(request, connection)
        if asked is None:
            return self._turn_away(transport, connection)
        if not connection.proved:
            self._welcome(transport, connection)
        connection.busy = True
        try:
            return await self._answer(request, asked)
        finally:
            connection.busy, connection.idle_since_s = False, time.monotonic()

    def _prove(self, request: web.BaseRequest, connection: _Connection) -> proof.Request | None:
        """The request, if it comes with a proof that was never used."""
        given = proof.parse_credentials(request.headers.get("Authorization", ""))
        if given is None:
            return None
        client_nonce, count, mac = given
        asked = proof.Request(
            run=self._settings.run,
            donor=self._settings.peer,
            method=request.method,
            target=request.raw_path,
            byte_range=request.headers.get("Range", ""),
            server_nonce=connection.nonce,
            client_nonce=client_nonce,
            count=count,
        )
        if not asked.fits(self._key, mac) or count <= connection.count:
            return None
        connection.count = count
        return asked

    def _turn_away(self, transport: asyncio.BaseTransport, connection: _Connection) -> web.Response:
        """The one answer that strangers get."""
        connection.failed_proofs += 1
        answer = web.Response(status=401, headers={"WWW-Authenticate": proof.challenge(connection.nonce)})
        if connection.failed_proofs >= _MAX_FAILED_PROOFS:
            answer.force_close()
        return answer

    def _welcome(self, transport: asyncio.Transport, connection: _Connection) -> None:
        self._make_room()
        self._gate.proved(transport)
        connection.proved = True
        # Little waits in the kernel, so that a change of rate is felt at once.
        transport.set_write_buffer_limits(high=_NOT_SENT_BYTES)
        wire = transport.get_extra_info("socket")
        if wire is not None and wire.family in (socket.AF_INET, socket.AF_INET6):
            wire.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _NOT_SENT_BYTES)

    def _make_room(self) -> None:
        proved = [
            (each, how) for each, how in self._connections.items() if how.proved and not each.is_closing()
        ]
        if len(proved) < MAX_PEERS:
            return
        transport, _ = min(proved, key=lambda pair: (pair[1].busy, pair[1].idle_since_s))
        assert isinstance(transport, asyncio.Transport)
        transport.abort()

    async def _answer(self, request: web.BaseRequest, asked: proof.Request) -> web.StreamResponse:
        if asked.method != "GET":
            return self._say(asked, 405, b"")
        after = listing_after(asked.target)
        if after is not None:
            held = look_up(self._folder, after) if self._folder else Held()
            return self._say(asked, 200, msgspec.json.encode(held))
        try:
            if self._folder is None:
                raise NotThereError
            opened = open_part(self._folder, asked.target, asked.byte_range)
        except NotThereError:
            return self._say(asked, 404, b"")
        except BadRangeError:
            return self._say(asked, 416, b"")
        try:
            if asked.target.endswith(".json"):
                return await self._send_small(asked, opened)
            return await self._send(request, asked, opened)
        finally:
            opened.close()

    async def _send_small(self, asked: proof.Request, opened: Opened) -> web.Response:
        """A manifest or the head of an update: its proof covers the body."""
        parts, done = [], 0
        try:
            while done < opened.size_bytes:
                parts.append(opened.read(done, opened.size_bytes - done))
                done += len(parts[-1])
        except NotThereError:
            return self._say(asked, 404, b"")
        await self._pace.take(done)
        return self._say(asked, 206 if asked.byte_range else 200, b"".join(parts))

    async def _send(
        self, request: web.BaseRequest, asked: proof.Request, opened: Opened
    ) -> web.StreamResponse:
        """Part of a shard or of an update's bytes, at the pace there is. Cut off when the bytes are not there any
        more, or when the reader takes none for a long time."""
        status = 206 if asked.byte_range else 200
        answer = web.StreamResponse(
            status=status,
            headers={proof.REPLY_HEADER: asked.reply_proof(self._key, status, opened.size_bytes, None)},
        )
        answer.content_type = "application/octet-stream"
        answer.content_length = opened.size_bytes
        if asked.byte_range:
            last = opened.offset + opened.size_bytes - 1
            answer.headers["Content-Range"] = f"bytes {opened.offset}-{last}/{opened.total_bytes}"
        await answer.prepare(request)
        done = 0
        try:
            while done < opened.size_bytes:
                wanted = min(self._pace.at_once(), opened.size_bytes - done)
                await self._pace.take(wanted)
                data = opened.read(done, wanted)
                async with asyncio.timeout(_STUCK_S):
                    await answer.write(data)
                done += len(data)
                await asyncio.sleep(0)  # a reader on a fast line never blocks the others
        except (NotThereError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError from None
        return answer

    def _say(self, asked: proof.Request, status: int, body: bytes) -> web.Response:
        mac = asked.reply_proof(self._key, status, len(body), body)
        return web.Response(
            status=status,
            body=body,
            headers={proof.REPLY_HEADER: mac},
            content_type="application/json",
        )

    def _bytes_per_s(self) -> float:
        cap, now_s = self._settings.max_bytes_per_s, time.monotonic()
        if not self._round_moves():
            self._moving_since_s = None
            return cap
        if self._moving_since_s is None:
            self._moving_since_s = now_s
        if now_s - self._moving_since_s < QUIET_S:
            return min(cap, QUIET_BYTES_PER_S) if cap else QUIET_BYTES_PER_S
        return max(cap * FLOOR_SHARE, min(cap, 64 << 10)) if cap else FLOOR_BYTES_PER_S

    def _round_moves(self) -> bool:
        """Whether the trainer has an op in flight."""
        if self._flag is None:
            return False
        self._flag.seek(0)
        return self._flag.read(1) == b"\1"

    def _move(self, folder: Path) -> None:
        if self._flag is not None:
            self._flag.close()
        self._folder = folder
        try:
            self._flag = (folder / YIELD).open("rb", buffering=0)
        except OSError:
            self._flag = None  # the folder went with its trainer
