"""Plain TCP between members: what the network gives to bare sockets, without codec, frames or sums.

One thread, one poll loop, all connections at once and in both directions.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import struct
import time
from collections.abc import Sequence

from atoll.errors import DeadlineExceeded, Unreachable

BLOCK_BYTES = 1 << 20
_INTRODUCTION = struct.Struct(
    "<II32s"
)  # index of the member that dials, number of the stream, proof of the key


class PlainSockets:
    """One member's plain connections to the others, dialled when first asked for, and kept."""

    def __init__(self, index: int, host: str, key: bytes) -> None:
        self._index, self._key = index, key
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self._streams: dict[tuple[int, int], socket.socket] = {}
        self._addresses: Sequence[tuple[str, int]] = ()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def meet(self, addresses: Sequence[tuple[str, int]]) -> None:
        self._addresses = addresses

    def exchange(self, num_bytes: int, targets: Sequence[int], streams: int, within_s: float) -> float:
        """Send `num_bytes` to each target and receive as much from each; returns the seconds this took.

        Raises Unreachable or DeadlineExceeded.
        """
        deadline_s = time.monotonic() + within_s
        used = [self._stream(target, n, deadline_s) for target in targets for n in range(streams)]
        share = -(-num_bytes // streams)
        for one in used:  # nobody starts the clock before all connections are up
            one.setblocking(True)
            one.settimeout(within_s)
            one.sendall(b"?")
        for one in used:
            if one.recv(1) != b"?":
                raise Unreachable("a member closed its plain connection")
        begin = time.perf_counter()
        _pump(used, share, deadline_s)
        return time.perf_counter() - begin

    def echo(self, target: int, count: int, answer: bool, within_s: float) -> tuple[float, ...]:
        """`count` round trips of one byte; whoever answers times nothing."""
        stream = self._stream(target, 0, time.monotonic() + within_s)
        stream.setblocking(True)
        stream.settimeout(within_s)
        trips = []
        for _ in range(count):
            begin = time.perf_counter()
            if not answer:
                stream.sendall(b"!")
            if stream.recv(1) != b"!":
                raise Unreachable("a member closed its plain connection")
            if answer:
                stream.sendall(b"!")
            trips.append(time.perf_counter() - begin)
        return () if answer else tuple(trips)

    def close(self) -> None:
        for stream in [*self._streams.values(), self._listener]:
            stream.close()

    def _stream(self, target: int, number: int, deadline_s: float) -> socket.socket:
        """The lower index dials; the other waits for it."""
        if (target, number) not in self._streams and self._index < target:
            stream = socket.create_connection(self._addresses[target], timeout=_left_s(deadline_s))
            stream.sendall(_INTRODUCTION.pack(self._index, number, self._proof(self._index, number)))
            self._streams[target, number] = _tuned(stream)
        while (target, number) not in self._streams:
            self._listener.settimeout(_left_s(deadline_s))
            try:
                self._admit(self._listener.accept()[0], deadline_s)
            except TimeoutError:
                raise DeadlineExceeded(f"member {target} did not connect its plain socket") from None
        return self._streams[target, number]

    def _admit(self, stream: socket.socket, deadline_s: float) -> None:
        stream.settimeout(_left_s(deadline_s))
        said = stream.recv(_INTRODUCTION.size, socket.MSG_WAITALL)
        index, number, proof = _INTRODUCTION.unpack(said.ljust(_INTRODUCTION.size, b"\0"))
        if hmac.compare_digest(proof, self._proof(index, number)):
            self._streams[index, number] = _tuned(stream)
        else:
            stream.close()

    def _proof(self, index: int, number: int) -> bytes:
        return hmac.digest(self._key, b"plain %d %d" % (index, number), "sha256")


def _pump(streams: Sequence[socket.socket], num_bytes: int, deadline_s: float) -> None:
    """Send and receive `num_bytes` on every stream."""
    block, sink = memoryview(bytes(BLOCK_BYTES)), bytearray(BLOCK_BYTES)
    to_send = dict.fromkeys(streams, num_bytes)
    to_hear = dict.fromkeys(streams, num_bytes)
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            stream.setblocking(False)
            selector.register(stream, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while selector.get_map():
            ready = selector.select(_left_s(deadline_s))
            if not ready:
                raise DeadlineExceeded("the plain sockets moved nothing until the deadline")
            for key, events in ready:
                stream: socket.socket = key.fileobj  # type: ignore[assignment]
                if events & selectors.EVENT_WRITE and to_send[stream]:
                    to_send[stream] -= stream.send(block[: to_send[stream]])
                if events & selectors.EVENT_READ:
                    count = stream.recv_into(sink, min(BLOCK_BYTES, to_hear[stream]))
                    if count == 0:
                        raise Unreachable("a member closed its plain connection")
                    to_hear[stream] -= count
                wanted = (selectors.EVENT_WRITE if to_send[stream] else 0) | (
                    selectors.EVENT_READ if to_hear[stream] else 0
                )
                if not wanted:
                    selector.unregister(stream)
                elif wanted != key.events:
                    selector.modify(stream, wanted)


def _tuned(stream: socket.socket) -> socket.socket:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


def _left_s(deadline_s: float) -> float:
    return max(0.001, deadline_s - time.monotonic())
