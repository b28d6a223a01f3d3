"""The engine's wire protocol written a second time, in Python: for peers that misbehave on purpose.

It is also an independent reading of native/engine/{hello,frame}.h: if either changes, these tests say so.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import ssl
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

from support import engines

HELLO_BYTES, PROOF_BYTES, FRAME_BYTES = 256, 32, 64
BEGIN, CONTRIBUTION, FINISHED, ACK_CONTRIBUTION, ACK_FINISHED, PING, PONG, PROBE = range(1, 9)

_HEADER = struct.Struct("<4sBxxxQQIIQIIQ")
_MASK = (1 << 64) - 1
_KEY_STEP = 0x9E3779B97F4A7C15


def hello(run: str, peer: str, target: str, nonce: bytes | None = None, instance: int = 1) -> bytes:
    name = peer.encode()
    return struct.pack(
        "<8sIII4x32s32s32s128sQ",
        b"ATOLL-1\n",
        2,
        0,
        len(name),
        hashlib.sha256(run.encode()).digest(),
        nonce or secrets.token_bytes(32),
        hashlib.sha256(target.encode() + b"\x000").digest(),
        name,
        instance,
    )


def _finish(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def checksum64(data: bytes) -> int:
    key, products, total = _finish(_KEY_STEP), 0, 0
    padded = data + bytes(8 - len(data) % 8)  # a word of the tail, even of an empty one
    for index, (word,) in enumerate(struct.iter_unpack("<Q", padded)):
        mixed = (key + index * _KEY_STEP + word) & _MASK
        products = (products + (mixed & 0xFFFFFFFF) * (mixed >> 32)) & _MASK
        total = (total + mixed) & _MASK
    return _finish((products + _finish(total ^ _finish(len(data)))) & _MASK)


@dataclass(frozen=True)
class Frame:
    kind: int
    op: tuple[int, int, int, int]
    plan_digest: int
    chunk: int = 0
    payload: bytes = b""

    def pack(self, length: int | None = None, checksum: int | None = None) -> bytes:
        """The bytes on the wire; `length` and `checksum` are lies, if given."""
        header = _HEADER.pack(
            b"ATLF",
            self.kind,
            *self.op,
            self.plan_digest,
            self.chunk,
            len(self.payload) if length is None else length,
            (checksum64(self.payload) if self.payload else 0) if checksum is None else checksum,
        )
        return header + struct.pack("<Q", checksum64(header)) + self.payload


def connect(port: int) -> socket.socket:
    """To an engine; in TLS, with the standard library's, if the test's engines speak it."""
    plain = socket.create_connection(("127.0.0.1", port), timeout=10.0)
    if engines.TLS is None:
        return plain
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(engines.CERTIFICATES / "authority.pem")
    context.load_cert_chain(engines.CERTIFICATES / "peer.pem", engines.CERTIFICATES / "peer.key")
    return context.wrap_socket(plain)


class RawPeer:
    """Dials an engine as `peer`, proves the key, then says what the test wants. Every wait is bounded."""

    def __init__(
        self, port: int, peer: str, target: str, key: bytes, run: str = "test", instance: int = 1
    ) -> None:
        self.socket = connect(port)
        ours = hello(run, peer, target, instance=instance)
        self.socket.sendall(ours)
        theirs = self.read(HELLO_BYTES)
        self.socket.sendall(hmac.digest(key, b"d" + ours + theirs, "sha256"))
        assert self.read(PROOF_BYTES) == hmac.digest(key, b"a" + ours + theirs, "sha256")

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.socket.recv(count - len(data))
            if not more:
                raise ConnectionResetError(f"closed after {len(data)} of {count} bytes")
            data += more
        return data

    def read_frame(self) -> Frame:
        """The next frame that is no ping and no pong."""
        while True:
            header = self.read(FRAME_BYTES)
            assert struct.unpack("<Q", header[56:])[0] == checksum64(header[:56])
            _, kind, term, round_, fragment, attempt, digest, chunk, length, checksum = _HEADER.unpack(
                header[:56]
            )
            payload = self.read(length)
            assert not payload or kind == PROBE or checksum == checksum64(payload)
            if kind not in (PING, PONG):
                return Frame(kind, (term, round_, fragment, attempt), digest, chunk, payload)

    def read_frames(self) -> Iterator[Frame]:
        """Frames until the engine has been silent for as long as the socket's timeout."""
        while True:
            try:
                yield self.read_frame()
            except TimeoutError:
                return

    def begin(self) -> Frame:
        """Waits for the engine's begin and answers with the same: both may send data now."""
        theirs = self.read_frame()
        assert theirs.kind == BEGIN
        self.send(theirs)
        return theirs

    def send(self, frame: Frame, length: int | None = None, checksum: int | None = None) -> None:
        self.socket.sendall(frame.pack(length, checksum))

    def ack(self, frame: Frame) -> None:
        kind = ACK_FINISHED if frame.kind == FINISHED else ACK_CONTRIBUTION
        self.send(replace(frame, kind=kind, payload=b""))

    def was_closed(self) -> bool:
        """The engine closes the connection; what it sends before that is not looked at."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except (ConnectionResetError, ssl.SSLError):
            pass
        return True

    def close(self) -> None:
        self.socket.close()
