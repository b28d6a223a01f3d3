"""The connections of the watch: each rank has one to rank 0, and small messages travel over them.

They are sockets of our own, not a process group: the kernel says at once when the other end's process is gone, nothing
can block, and an idle rank costs nothing. The secret that a sibling shows comes from the store that all ranks meet in.
Messages are MessagePack, each behind its length; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import time
from datetime import timedelta

import msgspec

from atoll.errors import LocalError, SiblingLost
from atoll.mesh.group import RankGroup
from atoll.values import OpId

_SECRET_BYTES = 32
_LENGTH_BYTES = 2
REASON_CHARS = 1000


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """Sent ten times a second."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """An operation is given up: this rank heard so, or failed in it."""

    op: OpId


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag="goodbye"):
    """This rank is done, and ends."""


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """Rank `rank` is lost, or ended with an error: all end, with this exit code."""

    rank: int
    reason: str
    exit_code: int


class _Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    rank: int
    secret: bytes


Message = Alive | Abort | Goodbye | Ended
_decode = msgspec.msgpack.Decoder(Message).decode
_decode_hello = msgspec.msgpack.Decoder(_Hello).decode


class BrokenLinkError(Exception):
    """The other end closed the connection, or sent what is no message."""


class Link:
    """One connection: never blocks. For the watch's thread alone, once that runs."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.heard_s = time.monotonic()
        self.left = False
        """The other end said goodbye."""
        self._socket = connection
        self._received = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message | _Hello) -> None:
        """Queue `message` and send what the kernel takes. Raises BrokenLinkError."""
        data = msgspec.msgpack.encode(message)
        self._unsent += len(data).to_bytes(_LENGTH_BYTES, "little") + data
        self.flush()

    def flush(self) -> bool:
        """Send what the kernel takes; whether that was all. Raises BrokenLinkError."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return False
        except OSError as error:
            raise BrokenLinkError from error
        return True

    def receive(self) -> list[Message]:
        """What came whole so far. Raises BrokenLinkError at the end, when there is nothing more."""
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError as error:
            raise BrokenLinkError from error
        if not data:
            raise BrokenLinkError
        self.heard_s = time.monotonic()
        self._received += data
        try:
            return [_decode(each) for each in self._whole()]
        except msgspec.DecodeError as error:
            raise BrokenLinkError from error

    def end_sending(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()

    def _whole(self) -> list[bytes]:
        found = []
        while len(self._received) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._received[:_LENGTH_BYTES], "little")
            if len(self._received) < end:
                break
            found.append(bytes(self._received[_LENGTH_BYTES:end]))
            del self._received[:end]
        return found


def connect(group: RankGroup, timeout_s: float) -> dict[int, Link]:
    """Rank 0's links to all the others, or another rank's one to rank 0. Blocks at most `timeout_s`.

    Raises SiblingLost if that is not enough.
    """
    assert group.store is not None
    until_s = time.monotonic() + timeout_s
    try:
        if group.rank == 0:
            return _accept_all(group, until_s)
        return {0: _dial(group, until_s)}
    except (OSError, RuntimeError, BrokenLinkError) as error:
        raise SiblingLost(
            f"rank {group.rank} of {group.num_ranks} has no connection with "
            f"{'its siblings' if group.rank == 0 else 'rank 0'} for its watch within {timeout_s:g} s: {error}"
        ) from error


def _accept_all(group: RankGroup, until_s: float) -> dict[int, Link]:
    assert group.store is not None
    secret = secrets.token_bytes(_SECRET_BYTES)
    links: dict[int, Link] = {}
    with _listener(group.host) as listener:
        port = listener.getsockname()[1]
        group.store.set("watch", msgspec.json.encode([group.host, port, secret.hex()]).decode())
        while len(links) < group.num_ranks - 1:
            listener.settimeout(max(0.001, until_s - time.monotonic()))
            connection, _ = listener.accept()
            rank = _greeted(connection, secret, min(until_s, time.monotonic() + 2.0))
            if 0 < rank < group.num_ranks and rank not in links:
                links[rank] = Link(connection)
            else:
                connection.close()
    return links


def _listener(host: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.bind(address)
        listener.listen(64)
        return listener
    except OSError as error:
        raise LocalError(f"rank 0 cannot listen on {host}: {error.strerror or error}") from error


def _greeted(connection: socket.socket, secret: bytes, until_s: float) -> int:
    """The rank that this connection proves to be; -1 for a stranger."""
    data = bytearray()
    try:
        while len(data) < _LENGTH_BYTES or len(data) < _LENGTH_BYTES + int.from_bytes(data[:2], "little"):
            connection.settimeout(max(0.001, until_s - time.monotonic()))
            # Byte by byte: what follows the greeting is for the watch.
            piece = connection.recv(1)
            if not piece:
                return -1
            data += piece
        hello = _decode_hello(bytes(data[_LENGTH_BYTES:]))
    except (OSError, msgspec.DecodeError):
        return -1
    return hello.rank if hmac.compare_digest(hello.secret, secret) else -1


def _dial(group: RankGroup, until_s: float) -> Link:
    assert group.store is not None
    group.store.wait(["watch"], timedelta(seconds=max(0.001, until_s - time.monotonic())))
    host, port, secret = msgspec.json.decode(group.store.get("watch"), type=tuple[str, int, str])
    connection = socket.create_connection((host, port), max(0.001, until_s - time.monotonic()))
    link = Link(connection)
    link.send(_Hello(group.rank, bytes.fromhex(secret)))
    return link
