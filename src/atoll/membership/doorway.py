"""The coordinator's HTTP: a WebSocket for each kind of visitor at a path of its own, and nothing anywhere else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import hdrs, web

from atoll.membership.frames import PART_BYTES
from atoll.membership.gate import PROVE_S

AUTHORITY_PATH = "/v1/authority"

Attend = Callable[[web.WebSocketResponse, asyncio.Transport | None], Awaitable[None]]
"""One connection from its first byte to its last. The transport is None once it is gone."""


class Doorway:
    """Who comes to which path is attended by whom. For one event loop."""

    def __init__(
        self, greeting: str, visitors: Mapping[str, Attend], elsewhere: int = 404, authority: str = ""
    ) -> None:
        """`greeting` is for browsers; `elsewhere` the HTTP status of any other path. `authority` is the certificate
        (PEM) that newcomers fetch, to hold it against the fingerprint that they were given; "": there is none."""
        self._greeting, self._visitors, self._elsewhere = greeting, visitors, elsewhere
        self._authority = authority
        self._attending: set[asyncio.Task[Any]] = set()
        # A private logger: aiohttp would write a line for every stranger that sends nonsense.
        quiet = logging.Logger("atoll.membership.http", logging.CRITICAL + 1)
        self.http = web.Server(self._handle, access_log=None, logger=quiet, keepalive_timeout=PROVE_S)

    async def close(self, patience_s: float = 0.0) -> None:
        """Who is being attended may finish, for at most so long."""
        if self._attending and patience_s:
            await asyncio.wait(self._attending, timeout=patience_s)
        await self.http.shutdown(timeout=1.0)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET" and request.path == "/":
            return self._say(200, self._greeting)
        if request.method == "GET" and request.path == AUTHORITY_PATH and self._authority:
            return self._say(200, self._authority)
        websocket = web.WebSocketResponse(timeout=1.0, compress=False, max_msg_size=PART_BYTES + 1)
        offers = hdrs.SEC_WEBSOCKET_PROTOCOL in request.headers  # aiohttp would log what is offered
        attend = self._visitors.get(request.path)
        if attend is None or offers or not websocket.can_prepare(request):
            return self._say(self._elsewhere, "nothing here")
        await websocket.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        self._attending.add(task)
        try:
            await attend(websocket, request.transport)
        except ConnectionError:
            pass  # the other side went away in the middle of a word
        finally:
            self._attending.discard(task)
        return websocket

    @staticmethod
    def _say(status: int, text: str) -> web.Response:
        return web.Response(status=status, text=f"{text}\n")
