"""etcd over its JSON gateway (HTTP): as much as the coordinator's journal needs, in plain blocking calls.

A call goes to one endpoint after the other, the last good one first, until one answers or the call's time is
over; each gets a fair share of it, and no more than `try_s` at once. A try that was cut off may have been
carried out all the same, so callers send only what may be said twice. Nothing is shared: one thread, that of the
coordinator's event loop.
"""

from __future__ import annotations

import http.client
import queue
import socket
import threading
import time
from typing import Any, TypeVar

import msgspec

from atoll.addresses import split_address

PAUSE_S = 0.05  # between two rounds over all endpoints

# gRPC codes that the same call would meet again: invalid, not found, denied, exhausted, precondition, range,
# unimplemented, unauthenticated.
_FINAL_CODES = frozenset({3, 5, 7, 8, 9, 11, 12, 16})
NOT_FOUND = 5

Answer = TypeVar("Answer")


class EtcdGone(Exception):
    """No endpoint answered in time. It may have done what it was asked."""


class EtcdRefused(Exception):
    """etcd answered that it will not do this. `code` is gRPC's."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


# ---- what etcd answers: int64 come as JSON strings, bytes in base64, and what is zero or empty is left out ------


class Header(msgspec.Struct, frozen=True):
    revision: int = 0


class KeyValue(msgspec.Struct, frozen=True):
    key: bytes
    value: bytes = b""
    create_revision: int = 0


class Found(msgspec.Struct, frozen=True):
    kvs: tuple[KeyValue, ...] = ()
    more: bool = False


class Done(msgspec.Struct, frozen=True):
    """What one operation of a transaction gave; `response_range` if it was a `get`."""

    response_range: Found = Found()


class Settled(msgspec.Struct, frozen=True):
    """A transaction's end: whether its conditions held, and what the operations of that branch gave."""

    header: Header = Header()
    succeeded: bool = False
    responses: tuple[Done, ...] = ()

    def found(self, index: int) -> KeyValue | None:
        """What the `get` at this place of the branch found."""
        return next(iter(self.responses[index].response_range.kvs), None)


class _Complaint(msgspec.Struct, frozen=True):
    code: int
    message: str


# ---- what a transaction is made of -------------------------------------------------------------------------------


def is_absent(key: str) -> dict[str, object]:
    return was_created_at(key, 0)


def was_created_at(key: str, revision: int) -> dict[str, object]:
    """The condition that the key is the very one that was made at this revision."""
    return {"key": key.encode(), "target": "CREATE", "result": "EQUAL", "create_revision": str(revision)}


def put(key: str, value: bytes, lease: int = 0) -> dict[str, object]:
    return {"request_put": {"key": key.encode(), "value": value, "lease": str(lease)}}


def get(key: str) -> dict[str, object]:
    return {"request_range": {"key": key.encode()}}


def delete_range(first: str, end: str) -> dict[str, object]:
    """All keys from `first` to before `end`."""
    return {"request_delete_range": {"key": first.encode(), "range_end": end.encode()}}


class Etcd:
    """A client. Its calls raise EtcdGone, or EtcdRefused for an answer that trying again would not change."""

    def __init__(self, endpoints: tuple[str, ...], try_s: float) -> None:
        self.try_s = try_s
        self._endpoints = endpoints  # the last good one first
        self._connection: _Connection | None = None

    def transact(
        self,
        conditions: list[dict[str, object]],
        then: list[dict[str, object]],
        otherwise: list[dict[str, object]],
        within_s: float,
    ) -> Settled:
        """Do `then` if all conditions hold, else `otherwise`; either wholly, or nothing."""
        request = {"compare": conditions, "success": then, "failure": otherwise}
        return self.call("/v3/kv/txn", request, Settled, within_s)

    def read(self, first: str, end: str, limit: int, within_s: float) -> Found:
        """The keys from `first` to before `end` in their order, at most `limit`: the newest that etcd committed."""
        request = {"key": first.encode(), "range_end": end.encode(), "limit": limit}
        return self.call("/v3/kv/range", request, Found, within_s)

    def read_one(self, key: str) -> KeyValue | None:
        """One key, asking every endpoint once, for `try_s` together."""
        found = self.call("/v3/kv/range", {"key": key.encode()}, Found, self.try_s, again=False)
        return next(iter(found.kvs), None)

    def call(
        self, path: str, request: dict[str, Any], answer: type[Answer], within_s: float, *, again: bool = True
    ) -> Answer:
        """Without `again`, every endpoint is asked once only."""
        body = msgspec.json.encode(request)
        due_s = time.monotonic() + within_s
        while True:
            missed = []
            for index, endpoint in enumerate(self._endpoints):
                share_s = (due_s - time.monotonic()) / (len(self._endpoints) - index)
                try:
                    data = self._try(endpoint, path, body, min(share_s, self.try_s))
                    answered = msgspec.json.decode(data, type=answer, strict=False)
                except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
                    self.close()
                    missed.append(f"{endpoint}: {_phrase(error)}")
                else:
                    others = tuple(each for each in self._endpoints if each != endpoint)
                    self._endpoints = (endpoint, *others)
                    return answered
            if not again or time.monotonic() + PAUSE_S >= due_s:
                raise EtcdGone(f"no etcd answers ({'; '.join(missed)})")
            time.sleep(PAUSE_S)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _try(self, endpoint: str, path: str, body: bytes, within_s: float) -> bytes:
        """One request to one endpoint. Raises OSError or HTTPException if another may do better."""
        if self._connection is None or self._connection.endpoint != endpoint:
            self.close()
            self._connection = _Connection(endpoint)
        self._connection.due_s = time.monotonic() + within_s
        self._connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        data = response.read()
        if response.status != http.HTTPStatus.OK:
            raise _failure(response.status, data)
        return data


class _Connection(http.client.HTTPConnection):
    """A connection to one endpoint, kept from call to call, whose waits all end at `due_s` (monotonic)."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(*split_address(endpoint))
        self.endpoint = endpoint
        self.due_s = 0.0

    def connect(self) -> None:
        failure: OSError = ConnectionError("no address")
        for family, kind, protocol, _, address in _look_up(self.host, self.port, self.due_s):
            sock = _TimedSocket(family, kind, protocol)
            sock.connection = self
            try:
                sock.settimeout(_left_s(self.due_s))
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                sock.close()
                failure = error
            else:
                self.sock = sock
                return
        raise failure


class _TimedSocket(socket.socket):
    """A socket for http.client, which knows only how long one read may take, not all of them together."""

    connection: _Connection

    def recv_into(self, *arguments: Any, **more: Any) -> int:
        self.settimeout(_left_s(self.connection.due_s))
        return super().recv_into(*arguments, **more)

    def sendall(self, *arguments: Any, **more: Any) -> None:
        self.settimeout(_left_s(self.connection.due_s))
        super().sendall(*arguments, **more)


def _left_s(due_s: float) -> float:
    left_s = due_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _look_up(host: str, port: int, due_s: float) -> list[Any]:
    """The addresses of a name. On a short-lived daemon thread: a name server may hang for longer than we wait."""
    found: queue.SimpleQueue[list[Any] | OSError] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            found.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            found.put(error)

    threading.Thread(target=look_up, name="atoll-resolve", daemon=True).start()
    try:
        infos = found.get(timeout=_left_s(due_s))
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(infos, OSError):
        raise infos
    return infos


def _failure(status: int, data: bytes) -> EtcdRefused | OSError:
    """What an HTTP answer that is no success means: final, or worth another try."""
    try:
        complaint = msgspec.json.decode(data, type=_Complaint)
    except msgspec.MsgspecError:
        return ConnectionError(f"it is no etcd: it answered HTTP {status}")
    text = complaint.message.removeprefix("etcdserver: ")
    return EtcdRefused(text, complaint.code) if complaint.code in _FINAL_CODES else ConnectionError(text)


def _phrase(error: Exception) -> str:
    match error:
        case TimeoutError():
            return "no answer"
        case ConnectionRefusedError():
            return "connection refused"
        case http.client.RemoteDisconnected():
            return "it closed the connection"
        case http.client.HTTPException() | msgspec.MsgspecError():
            return "it is no etcd: it does not answer like one"
    strerror = getattr(error, "strerror", None)
    return strerror.lower() if strerror else str(error) or type(error).__name__
