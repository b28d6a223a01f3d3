"""The coordinator's end of one proven connection. Runs on the coordinator's event loop."""

from __future__ import annotations

import asyncio

from aiohttp import web

from atoll import log
from atoll.membership import gate
from atoll.membership.frames import OversizedError, pack
from atoll.membership.messages import Message

OUTBOX_MESSAGES = 1024
FLUSH_S = 2.0

_log = log.get(__name__)


class PeerConnection:
    """A bounded outbox that one task (`empty_outbox`) empties, so that no slow peer holds up the others."""

    def __init__(
        self, websocket: web.WebSocketResponse, transport: asyncio.Transport, proven: gate.Proven
    ) -> None:
        self.proven = proven
        self.peer, self.incarnation = proven.handshake.peer, proven.handshake.incarnation
        self.address = gate.address_of(transport)
        self._websocket = websocket
        self._transport = transport
        self._outbox: asyncio.Queue[Message | None] = asyncio.Queue(OUTBOX_MESSAGES)

    def close(self) -> None:
        """Close after all that was queued; a peer that does not take it within FLUSH_S is cut off."""
        self.send(None)
        asyncio.get_running_loop().call_later(FLUSH_S, self.abort)

    def send(self, message: Message | None) -> None:
        """Queue a message. A peer that does not read is cut off."""
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            _log.warning(
                "peer %s does not read: %d messages are waiting; closing", self.peer, OUTBOX_MESSAGES
            )
            self.abort()

    def abort(self) -> None:
        self._transport.abort()

    async def empty_outbox(self) -> None:
        try:
            while (message := await self._outbox.get()) is not None:
                for part in pack(message):
                    await self._websocket.send_bytes(part)
            await self._websocket.close()
        except ConnectionError:
            pass  # the receiving side notices
        except OversizedError as error:
            _log.error("cannot speak to peer %s: %s; closing", self.peer, error)
            self.abort()
