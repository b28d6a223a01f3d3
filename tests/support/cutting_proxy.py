"""A TCP proxy that resets connections after an exact number of bytes, both ends at once.

One thread owns all its sockets; `close()` joins it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
from collections.abc import Sequence
from types import TracebackType

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends a reset and drops what is queued
_READ_BYTES = 1 << 16


class _Pair:
    """Two ends of one proxied connection, and how many bytes may still pass."""

    def __init__(self, caller: socket.socket, target: socket.socket, left: int | None) -> None:
        self.other = {caller: target, target: caller}
        self.left = left

    def reset(self) -> None:
        for end in self.other:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            end.close()


class CuttingProxy:
    """Forwards to `target_port`. The first connections end after `cuts` bytes (both directions together) each."""

    def __init__(self, target_port: int, cuts: Sequence[int]) -> None:
        self._target_port = target_port
        self._cuts = list(cuts)
        self.done: list[int] = []
        """The cuts that fired."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake, self._stop = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._pairs: set[_Pair] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> CuttingProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.write(self._stop, b"x")
        self._thread.join(10.0)
        assert not self._thread.is_alive()
        for pair in self._pairs:
            pair.reset()
        self._selector.close()
        self._listener.close()
        os.close(self._wake)
        os.close(self._stop)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._wake:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._pairs:  # else it went in this batch
                    assert isinstance(key.fileobj, socket.socket)
                    self._forward(key.data, key.fileobj)

    def _accept(self) -> None:
        caller, _ = self._listener.accept()
        try:
            target = socket.create_connection(("127.0.0.1", self._target_port), timeout=5.0)
        except OSError:
            caller.close()
            return
        pair = _Pair(caller, target, self._cuts.pop(0) if self._cuts else None)
        self._pairs.add(pair)
        for end in pair.other:
            end.settimeout(5.0)
            self._selector.register(end, selectors.EVENT_READ, pair)

    def _forward(self, pair: _Pair, end: socket.socket) -> None:
        wanted = _READ_BYTES if pair.left is None else min(_READ_BYTES, pair.left)
        try:
            data = end.recv(wanted)
            pair.other[end].sendall(data)
        except OSError:
            data = b""
        if pair.left is not None:
            pair.left -= len(data)
            if pair.left == 0:
                self.done.append(len(data))
        if not data or pair.left == 0:
            self._drop(pair)

    def _drop(self, pair: _Pair) -> None:
        self._pairs.discard(pair)
        for end in pair.other:
            with contextlib.suppress(KeyError):
                self._selector.unregister(end)
        pair.reset()
