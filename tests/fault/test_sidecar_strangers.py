"""Strangers on a sidecar's port: they learn nothing, hold nothing up, and cost little."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from atoll.membership import gate
from atoll.recovery import proof
from atoll.recovery.donor import Donor
from atoll.recovery.sidecar.server import MAX_PEERS
from support.asking import Answer, Asker
from support.donating import commit_to, new_donor, stage_at, within
from support.history import History
from support.slack import SLACK_S

pytestmark = pytest.mark.fault

NUMEL = 200_000
SHARD = "/v1/snapshots/0-1/shard-00000.safetensors"


@pytest.fixture(scope="module")
def donor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Donor]:
    history = History(NUMEL)
    with new_donor(tmp_path_factory.mktemp("donor")) as donor:
        stage_at(history.state, [donor])
        commit_to(history, [donor])
        with Asker(donor.port) as asker:
            asker.held()
        yield donor


def assert_serves(donor: Donor) -> None:
    with Asker(donor.port, timeout_s=SLACK_S + 5.0) as asker:
        assert asker.ask(SHARD, "bytes=0-99").status == 206


def memory(donor: Donor) -> int:
    return psutil.Process(donor.pid).memory_info().rss


def descriptors(donor: Donor) -> int:
    return psutil.Process(donor.pid).num_fds()


def without_nonce(answer: Answer) -> tuple[int, frozenset[tuple[str, str]], bytes]:
    headers = {
        name: value for name, value in answer.headers.items() if name not in ("date", "www-authenticate")
    }
    return answer.status, frozenset(headers.items()), answer.body


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
def test_whatever_a_stranger_asks_the_answer_is_the_same(donor: Donor, method: str) -> None:
    answers = set()
    source = f"127.0.0.{10 + len(method)}"  # one source has few connections that prove nothing
    for target in (
        "/",
        "/v1/held/-1",
        SHARD,
        "/v1/updates/1-1.bin",
        "/v1/updates/7-7.bin",
        "/v1/snapshots/../../../../etc/passwd",
        "/v1/snapshots/%2e%2e/lock",
        "//v1//held/-1",
        "/" + "x" * 500,
    ):
        for headers in (
            {},
            {"Range": "bytes=0-9"},
            {"Range": "bytes=0-999999999999"},
            {"Authorization": "Basic eA=="},
        ):
            with Asker(donor.port, source=source) as stranger:
                answers.add(without_nonce(stranger.send(method, target, headers)))
    assert len(answers) == 1
    status, _, body = answers.pop()
    assert (status, body) == (401, b"")


def test_wrong_keys_runs_and_donors_are_strangers(donor: Donor) -> None:
    for wrong in (
        Asker(donor.port, key=b"x" * 32),
        Asker(donor.port, run="other"),
        Asker(donor.port, donor="p1"),
    ):
        with wrong as stranger:
            answer = stranger.ask(SHARD)
            assert (answer.status, answer.body) == (401, b"")
            assert "atoll-proof" not in answer.headers


def test_a_proof_is_good_once(donor: Donor) -> None:
    with Asker(donor.port) as peer, Asker(donor.port) as thief:
        peer.held()
        headers, _ = peer.headers("GET", SHARD)
        assert peer.send("GET", SHARD, headers).status == 200
        assert peer.send("GET", SHARD, headers).status == 401, "on the same connection"
        assert thief.send("GET", SHARD, headers).status == 401, "on another one"
        unused, _ = peer.headers("GET", SHARD)
        assert thief.send("GET", SHARD, unused).status == 401, "one that was caught on its way"
        assert peer.send("GET", SHARD + "x", unused).status == 401, "for something else"
        older, _ = peer.headers("GET", SHARD)
    with Asker(donor.port) as peer:
        peer.held()
        assert peer.send("GET", SHARD, older).status == 401, "after the connection"


def test_somebody_who_guesses_is_hung_up_on(donor: Donor) -> None:
    with Asker(donor.port, key=b"x" * 32) as stranger:
        statuses = [stranger.ask(SHARD).status for _ in range(2)]
        assert statuses == [401, 401]
        assert stranger.send("GET", SHARD, {}).status == 401  # http.client connects anew
        assert stranger.nonce != bytes(16)


def test_noise_is_hung_up_on_and_costs_no_memory(donor: Donor) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    before = memory(donor)
    noises = [
        rng.randbytes(8192),
        b"\x16\x03\x01\x02\x00" * 50,
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 100_000,
        b"GET /" + b"x" * 1_000_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nAuthorization: " + b"x" * 1_000_000,
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 1_000_000,
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffff\r\n" + b"x" * 1_000_000,
        b"GET / HTTP/1.1\r\n\r\n" * 20_000,
    ]
    for noise in noises:
        with socket.create_connection(
            ("127.0.0.1", donor.port), timeout=gate.PROVE_S + SLACK_S, source_address=("127.0.0.9", 0)
        ) as stranger:
            with contextlib.suppress(OSError):
                stranger.sendall(noise)
                stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while stranger.recv(65536):
                    pass
        assert_serves(donor)
    assert memory(donor) - before < 32 << 20


def test_slow_strangers_hold_nobody_up_and_are_hung_up_on(donor: Donor) -> None:
    """Each says a little of a request now and then; there are more of them than the sidecar has places for, and they
    come from several sources, since one alone has few."""
    before = descriptors(donor)
    crowd = [
        socket.create_connection(
            ("127.0.0.1", donor.port), timeout=5.0, source_address=(f"127.0.0.{2 + number % 6}", 0)
        )
        for number in range(3 * gate.MAX_STRANGERS)
    ]
    try:
        for each in crowd:
            with contextlib.suppress(OSError):
                each.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
        assert_serves(donor)
        assert descriptors(donor) <= before + gate.MAX_STRANGERS + 4
        end_s = time.monotonic() + gate.PROVE_S + SLACK_S
        while descriptors(donor) > before + 2:
            assert time.monotonic() < end_s, "slow strangers stay for ever"
            for each in crowd:
                with contextlib.suppress(OSError):
                    each.sendall(b"x")
            time.sleep(0.2)
        assert_serves(donor)
    finally:
        for each in crowd:
            each.close()


def test_a_crowd_of_peers_has_a_limit_too(donor: Donor) -> None:
    """Who was idle longest makes room."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(Asker(donor.port))
        first.held()
        for _ in range(MAX_PEERS + 5):
            stack.enter_context(Asker(donor.port)).held()
        assert descriptors(donor) < MAX_PEERS + 40
        nonce = first.nonce
        with contextlib.suppress(OSError, AssertionError):
            first.ask("/v1/held/-1")
        with contextlib.suppress(OSError):
            first.send("GET", "/", {})
        assert first.nonce != nonce, "the oldest was hung up on"
    within(SLACK_S, lambda: descriptors(donor) < 40, "the crowd is gone")
    assert_serves(donor)


def test_a_reader_that_takes_nothing_holds_nobody_up(donor: Donor, tmp_path: Path) -> None:
    with Asker(donor.port) as lazy:
        lazy.held()
        headers, _ = lazy.headers("GET", SHARD)
        lazy.connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connection.request("GET", SHARD, headers=headers)
        for _ in range(5):
            assert_serves(donor)


def test_a_proof_says_nothing_about_the_key() -> None:
    """Nor does its text: it is of one length, whatever it is about."""
    sizes = set()
    for count in (1, 10**14):
        asked = proof.Request(
            run="r" * count.bit_length(),
            donor="d",
            method="GET",
            target="/",
            byte_range="",
            server_nonce=bytes(16),
            client_nonce=bytes(16),
            count=count,
        )
        parsed = proof.parse_credentials(asked.credentials(b"k" * 32))
        assert parsed is not None
        sizes.add(len(parsed[2]))
    assert sizes == {64}
