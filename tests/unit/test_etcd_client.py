"""Talking to etcd: an endpoint that is gone, silent, slow or no etcd costs a bounded wait, and the next is asked."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from atoll.errors import ConfigError
from atoll.membership import etcd_client
from atoll.membership.etcd_client import Etcd, EtcdGone, EtcdRefused, delete_range, get, is_absent, put
from atoll.membership.etcd_place import EtcdPlace, parse_place
from support.etcd import EtcdProcess, free_ports
from support.slack import SLACK_S


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """An endpoint whose every connection is handed to `answer`."""
    ended = threading.Event()

    def accept(listener: socket.socket) -> None:
        while not ended.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                with suppress(OSError):
                    answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, args=(listener,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    assert not thread.is_alive()


@contextmanager
def asking(*endpoints: str, try_s: float = 5.0) -> Iterator[Etcd]:
    client = Etcd(endpoints, try_s)
    try:
        yield client
    finally:
        client.close()


def silent(connection: socket.socket) -> None:
    while connection.recv(4096):
        pass


def trickling(connection: socket.socket) -> None:
    """Each byte alone comes in good time; all of them would take for ever."""
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"X")
        time.sleep(0.05)


def says(text: bytes) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(text)
        connection.shutdown(socket.SHUT_WR)
        silent(connection)  # closed with something unread, it would be reset

    return answer


def page(status: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


def closed() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


# ---- nobody there ------------------------------------------------------------------------------------------------


def test_every_endpoint_is_named_with_what_it_did() -> None:
    gone = closed()
    with answering(silent) as mute:
        with asking(gone, mute, try_s=0.2) as client, pytest.raises(EtcdGone) as caught:
            client.read_one("k")
    assert str(caught.value) == f"no etcd answers ({gone}: connection refused; {mute}: no answer)"


@pytest.mark.parametrize("answer", [silent, trickling], ids=["silent", "trickling"])
def test_a_call_ends_in_time_whatever_the_other_end_does(answer: Callable[[socket.socket], None]) -> None:
    with answering(answer) as endpoint:
        with asking(endpoint, try_s=0.3) as client:
            begun_s = time.monotonic()
            with pytest.raises(EtcdGone, match="no answer"):
                client.transact([], [], [], within_s=0.8)
            assert 0.3 <= time.monotonic() - begun_s < 0.8 + SLACK_S


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        (page("404 Not Found", b"nothing here"), "it is no etcd: it answered HTTP 404"),
        (page("200 OK", b"<html>hello</html>"), "it is no etcd: it does not answer like one"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "it is no etcd: it does not answer like one"),
        (b"", "it closed the connection"),
        (page("503 Unavailable", b'{"code": 14, "message": "etcdserver: no leader"}'), "no leader"),
    ],
)
def test_what_is_no_use_is_told_apart(text: bytes, phrase: str) -> None:
    with answering(says(text)) as endpoint:
        with asking(endpoint, try_s=2.0) as client, pytest.raises(EtcdGone) as caught:
            client.read_one("k")
    assert str(caught.value) == f"no etcd answers ({endpoint}: {phrase})"


def test_a_name_server_that_hangs_costs_a_bounded_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(etcd_client.socket, "getaddrinfo", lambda *given, **more: released.wait(30) and [])
    begun_s = time.monotonic()
    with pytest.raises(EtcdGone, match=r"no-such-host\.invalid:2379: no answer"):
        with asking("no-such-host.invalid:2379", try_s=0.3) as client:
            client.read_one("k")
    assert time.monotonic() - begun_s < 0.3 + SLACK_S
    released.set()


# ---- one of several ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["closed", "silent", "no etcd"])
def test_the_next_endpoint_is_asked_and_stays_the_first(etcd: EtcdProcess, kind: str) -> None:
    behaviour = says(page("404 Not Found", b"")) if kind == "no etcd" else silent
    with answering(behaviour) as other:
        bad = closed() if kind == "closed" else other
        with asking(bad, etcd.endpoint, try_s=1.0) as client:
            assert client.read_one("k") is None
            begun_s = time.monotonic()
            for _ in range(20):
                client.read_one("k")
            assert time.monotonic() - begun_s < 20 * 0.5, "the bad one was asked first every time"


def test_it_finds_an_etcd_that_comes_up_meanwhile(etcd: EtcdProcess) -> None:
    etcd.kill()
    with asking(etcd.endpoint, try_s=0.5) as client:
        starting = threading.Thread(target=etcd.start)
        starting.start()
        assert client.transact([], [], [get("k")], within_s=30.0).succeeded
        starting.join()


def test_a_connection_that_broke_is_made_anew(etcd: EtcdProcess) -> None:
    with asking(etcd.endpoint) as client:
        client.read_one("k")
        etcd.kill()
        etcd.start()
        assert client.transact([], [], [get("k")], within_s=5.0).succeeded


# ---- transactions ------------------------------------------------------------------------------------------------


def test_a_transaction_does_one_branch_wholly(etcd: EtcdProcess) -> None:
    with asking(etcd.endpoint) as client:
        first = client.transact([is_absent("t/a")], [put("t/a", b"1"), put("t/b", b"2")], [get("t/a")], 5.0)
        assert first.succeeded
        second = client.transact([is_absent("t/a")], [put("t/b", b"3")], [get("t/a"), get("t/c")], 5.0)
        assert not second.succeeded
        found = second.found(0)
        assert found is not None
        assert (found.value, found.create_revision) == (b"1", first.header.revision)
        assert second.found(1) is None
        read = client.read("t/", "t0", 1, 5.0)
        assert [(each.key, each.value) for each in read.kvs] == [(b"t/a", b"1")]
        assert read.more
        client.transact([], [delete_range("t/", "t0")], [], 5.0)
        assert client.read_one("t/a") is None


def test_what_etcd_will_never_do_is_not_tried_again(etcd: EtcdProcess) -> None:
    with asking(etcd.endpoint) as client:
        begun_s = time.monotonic()
        with pytest.raises(EtcdRefused, match="request is too large"):
            client.transact([], [put("large", b"x" * 1_600_000)], [], within_s=60.0)
        assert time.monotonic() - begun_s < 60.0 / 2


def test_nothing_of_http_client_is_let_through(etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection left in the middle of an answer must not be used again."""
    with asking(etcd.endpoint) as client:
        real, failed = http.client.HTTPResponse.read, []

        def read(self: http.client.HTTPResponse, *given: int) -> bytes:
            if not failed:
                failed.append(True)
                raise TimeoutError
            return real(self, *given)

        monkeypatch.setattr(http.client.HTTPResponse, "read", read)
        assert client.transact([], [], [get("k")], within_s=5.0).succeeded


# ---- places ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("etcd://h:2379/p", EtcdPlace(("h:2379",), "p")),
        ("etcd://h:2379, g:2379/a/b/", EtcdPlace(("h:2379", "g:2379"), "a/b")),
        ("etcd://[::1]:2379", EtcdPlace(("[::1]:2379",), "atoll/my-run")),
    ],
)
def test_a_place_is_read_as_it_is_written(text: str, place: EtcdPlace) -> None:
    assert parse_place(text, "my-run") == place
    assert parse_place(str(place), "other") == place


@pytest.mark.parametrize(
    "text", ["etcd://", "etcd://h", "etcd://h:2379,,g:2379", "etcd:///p", "etcd://h:x/p"]
)
def test_what_is_no_place_is_said_before_anything_starts(text: str) -> None:
    with pytest.raises(ConfigError, match="is no endpoint of etcd; write etcd://HOST:2379 or"):
        parse_place(text, "my-run")
