"""Pings inside the VPN, over UDP: who answers is reached. A question also says which path its sender uses to the one
it asks. On the event loop of whoever opens it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any, cast

_ASK, _ANSWER = b"?", b"!"
_NONCE_BYTES = 8
_PATHS = {b"d": "direct", b"v": "vpn"}
MAX_WAITING = 4096


class Pings(asyncio.DatagramProtocol):
    """Asks and answers on one socket. `answered(who, seconds)` hears of every answer to a question of ours,
    `told(address, path)` which path the one with that address uses to us."""

    def __init__(self, answered: Callable[[bytes, float], None], told: Callable[[str, str], None]) -> None:
        self._answered, self._told = answered, told
        self._transport: asyncio.DatagramTransport | None = None
        self._waiting: dict[bytes, tuple[bytes, float]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)  # asyncio's own is none by class

    def ask(self, who: bytes, address: str, port: int, path: str) -> None:
        """Sends one question, and the path that is used to them; nothing happens if it is lost."""
        assert self._transport is not None
        nonce = os.urandom(_NONCE_BYTES)
        while len(self._waiting) >= MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]
        self._waiting[nonce] = (who, time.monotonic())
        self._transport.sendto(_ASK + nonce + path[:1].encode(), (address, port))

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        kind, nonce, path = data[:1], data[1 : 1 + _NONCE_BYTES], _PATHS.get(data[1 + _NONCE_BYTES :], "")
        if kind == _ASK and path and self._transport is not None:
            self._transport.sendto(_ANSWER + nonce, addr)
            self._told(addr[0], path)
        elif kind == _ANSWER and (waited := self._waiting.pop(nonce, None)) is not None:
            self._answered(waited[0], time.monotonic() - waited[1])

    def error_received(self, exc: Exception) -> None:
        """An unreachable address: it does not answer, which is all that counts."""
