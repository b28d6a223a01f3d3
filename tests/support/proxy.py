"""A TCP proxy between two engines, whoever of them dials: the place where a test breaks their links.

"up" is from the lower of the two to the upper, "down" back. Bytes are counted over all connections since the last
`arm`, so that a fault strikes at a byte of the conversation, hellos and all. What struck is told by `fired`.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

UP, DOWN = "up", "down"
BLOCK_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # linger 0: closing sends a reset


@dataclass
class Fault:
    """What happens in the given directions once `after` bytes have passed in the first of them.

    cut: bytes are swallowed. stall: nothing is read any more. reset: both ends get a reset. reject: the same, and new
    connections too. slow: `bytes_per_s` from then on. flip: one bit of one byte is changed, once.
    """

    kind: str
    after: int = 0
    directions: tuple[str, ...] = (UP, DOWN)
    bytes_per_s: float = 1e6
    fired: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class Pair:
    """The two sockets of one connection; once `dead`, nothing more is passed on."""

    dialler: socket.socket
    listener: socket.socket
    dead: bool = False


class Proxy:
    """Owns a listening socket for each end, and two threads a connection; `close` ends all."""

    def __init__(self, lower_port: int, upper_port: int) -> None:
        self.targets = {UP: upper_port, DOWN: lower_port}
        self._listeners = {way: socket.create_server(("127.0.0.1", 0), backlog=128) for way in (UP, DOWN)}
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._moved = {UP: 0, DOWN: 0}
        self._pairs: set[Pair] = set()
        self._closed = False
        self.rewrite: Callable[[Pair, str, bytes], bytes] | None = None
        """If given: what goes on instead, called with a connection, a direction and the bytes that came."""
        for way in (UP, DOWN):
            threading.Thread(target=self._accept, args=(way,), daemon=True).start()

    def port(self, way: str) -> int:
        """Where the lower dials the upper (up), or the upper the lower (down)."""
        return int(self._listeners[way].getsockname()[1])

    @property
    def moved(self) -> dict[str, int]:
        with self._lock:
            return dict(self._moved)

    def arm(self, fault: Fault | None) -> None:
        """From now on this fault, or none; counts begin anew.

        A connection that lost bytes to a cut is reset when it heals: TCP never goes on with a gap.
        """
        with self._lock:
            last, self._fault = self._fault, fault
            self._moved = {UP: 0, DOWN: 0}
        if last is not None and last.kind == "cut" and last.fired.is_set():
            self.reset()
        if fault is None:
            return
        if fault.after == 0 and fault.kind in ("reset", "reject"):
            fault.fired.set()
            self.reset()

    def reset(self) -> None:
        """Both ends of every connection get a reset."""
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            pair.dead = True
            for one in (pair.dialler, pair.listener):
                with contextlib.suppress(OSError):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RD)  # wakes the thread that reads it, which closes it

    def close(self) -> None:
        self._closed = True
        for listener in self._listeners.values():
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.reset()

    def _accept(self, way: str) -> None:
        while not self._closed:
            try:
                dialler, _ = self._listeners[way].accept()
            except OSError:
                return
            fault = self._fault
            if fault is not None and fault.kind == "reject" and fault.fired.is_set():
                dialler.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                dialler.close()
                continue
            try:
                listener = socket.create_connection(("127.0.0.1", self.targets[way]), timeout=5.0)
            except OSError:
                dialler.close()
                continue
            listener.settimeout(None)
            pair = Pair(dialler, listener)
            with self._lock:
                self._pairs.add(pair)
            back = DOWN if way == UP else UP
            for source, target, direction in ((dialler, listener, way), (listener, dialler, back)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                pump = threading.Thread(
                    target=self._pump, args=(pair, source, target, direction), daemon=True
                )
                pump.start()

    def _pump(self, pair: Pair, source: socket.socket, target: socket.socket, direction: str) -> None:
        try:
            while (data := source.recv(BLOCK_BYTES)) and not pair.dead:
                if self.rewrite is not None:
                    data = self.rewrite(pair, direction, data)
                passed = self._strike(data, direction)
                if pair.dead:  # a gap may follow, and TCP has none
                    break
                target.sendall(passed)
        except OSError:
            pass
        with self._lock:
            self._pairs.discard(pair)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(
                    socket.SHUT_RDWR
                )  # the other direction ends too; whoever is last closes nothing twice
        source.close()

    def _strike(self, data: bytes, direction: str) -> bytes:
        """What of these bytes goes on."""
        with self._lock:
            fault, before = self._fault, self._moved[direction]
            self._moved[direction] = before + len(data)
        if fault is None or direction not in fault.directions:
            return data
        leads = direction == fault.directions[0]
        due = before + len(data) > fault.after if leads else fault.fired.is_set()
        if not due:
            return data
        return self._suffer(fault, data, max(0, fault.after - before) if leads else 0)

    def _suffer(self, fault: Fault, data: bytes, at: int) -> bytes:
        first = not fault.fired.is_set()
        fault.fired.set()
        if fault.kind == "cut":
            return data[:at]
        if fault.kind == "flip":
            return data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :] if first else data
        if fault.kind == "slow":
            time.sleep(len(data) / fault.bytes_per_s)
            return data
        if fault.kind == "stall":
            while self._fault is fault and not self._closed:
                time.sleep(0.01)
            return data
        if first or fault.kind == "reject":
            self.reset()
            return b""
        return data
