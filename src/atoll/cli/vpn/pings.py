"""Pings inside the VPN, over UDP: who answers is reached. On the event loop of whoever opens it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any, cast

_ASK, _ANSWER = b"?", b"!"
_NONCE_BYTES = 8
MAX_WAITING = 4096


class Pings(asyncio.DatagramProtocol):
    """Asks and answers on one socket. `answered(who, seconds)` hears of every answer to a question of ours."""

    def __init__(self, answered: Callable[[bytes, float], None]) -> None:
        self._answered = answered
        self._transport: asyncio.DatagramTransport | None = None
        self._waiting: dict[bytes, tuple[bytes, float]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)  # asyncio's own is none by class

    def ask(self, who: bytes, address: str, port: int) -> None:
        """Sends one question; nothing happens if it is lost."""
        assert self._transport is not None
        nonce = os.urandom(_NONCE_BYTES)
        while len(self._waiting) >= MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]
        self._waiting[nonce] = (who, time.monotonic())
        self._transport.sendto(_ASK + nonce, (address, port))

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        if len(data) != 1 + _NONCE_BYTES:
            return
        kind, nonce = data[:1], data[1:]
        if kind == _ASK and self._transport is not None:
            self._transport.sendto(_ANSWER + nonce, addr)
        elif kind == _ANSWER and (waited := self._waiting.pop(nonce, None)) is not None:
            self._answered(waited[0], time.monotonic() - waited[1])

    def error_received(self, exc: Exception) -> None:
        """An unreachable address: it does not answer, which is all that counts."""
