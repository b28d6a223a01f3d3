"""Without the run's token a socket can do nothing: not join, not read, not make the coordinator allocate or
log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from atoll.errors import ConfigError, Refused
from atoll.membership import auth, gate, messages
from atoll.membership.messages import Challenge, Connect, Welcome
from atoll.membership.peer_connection import OUTBOX_MESSAGES, PeerConnection
from atoll.values import ParameterInfo
from support.fake_peer import TOKEN, CoordinatorThread, FakePeer, new_member

Socket = aiohttp.ClientWebSocketResponse


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorThread]:
    with CoordinatorThread(tmp_path / "journal") as running:
        yield running


def talk(coordinator: CoordinatorThread, said: Callable[[Socket], Awaitable[Any]]) -> Any:
    """What `said` returns of one raw WebSocket conversation with the coordinator."""

    async def conversation() -> Any:
        async with aiohttp.ClientSession() as http:
            async with http.ws_connect(f"http://{coordinator.address}/v1/peer", max_msg_size=0) as websocket:
                try:
                    async with asyncio.timeout(10):
                        return await said(websocket)
                finally:  # aiohttp leaves the connection open once the other side has hung up
                    websocket._response.close()

    return asyncio.run(conversation())


async def hear(websocket: Socket) -> Any:
    """The next message; None when the coordinator closed."""
    frame = await websocket.receive()
    if frame.type is not aiohttp.WSMsgType.BINARY:
        return None
    return messages.decode_from_coordinator(frame.data)


def connect(challenge: Challenge, *, token: bytes = TOKEN, **changes: Any) -> Connect:
    values: dict[str, Any] = {
        "protocol": messages.PROTOCOL,
        "run": "run",
        "peer": "a",
        "incarnation": "i",
        "client_nonce": b"n" * 32,
    } | changes
    proof = auth.Handshake(server_nonce=challenge.nonce, **values).peer_proof(token)
    nonce = values.pop("client_nonce")
    return Connect(package="test", nonce=nonce, proof=proof, **values)


def answer(**changes: Any) -> Callable[[Socket], Awaitable[Any]]:
    async def said(websocket: Socket) -> Any:
        await websocket.send_bytes(messages.encode(connect(await hear(websocket), **changes)))
        return await hear(websocket)

    return said


def assert_serves(coordinator: CoordinatorThread) -> None:
    """A good peer gets in."""
    member = new_member(coordinator.address, "good")
    member.connect()
    member.close()


# ---- who is refused, and with which words ------------------------------------------------------------------


def test_the_token_lets_a_peer_in(coordinator: CoordinatorThread) -> None:
    welcome = talk(coordinator, answer())
    assert isinstance(welcome, Welcome)
    assert welcome.settings == {"outer": {"lr": 0.7}}
    assert welcome.seen_as == "127.0.0.1"


def test_a_wrong_token_is_refused_in_one_sentence(coordinator: CoordinatorThread) -> None:
    member = new_member(coordinator.address, "a", token=b"x" * 32)
    with pytest.raises(
        Refused, match="the run token does not fit; give this peer and the coordinator the same"
    ) as caught:
        member.connect()
    assert caught.value.exit_code == 5
    member.close()
    assert_serves(coordinator)


def test_without_a_token_nothing_starts() -> None:
    with pytest.raises(ConfigError, match="the run token has 0 characters"):
        new_member("127.0.0.1:1", "a", token=b"")


def test_a_wrong_token_learns_nothing_about_the_run(coordinator: CoordinatorThread) -> None:
    wrong_token = talk(coordinator, answer(token=b"x" * 32))
    wrong_both = talk(coordinator, answer(token=b"x" * 32, run="other", peer="\n"))
    assert wrong_token == wrong_both
    assert "run'" not in wrong_token.reason


def test_another_run_is_refused_and_both_are_named(coordinator: CoordinatorThread) -> None:
    member = new_member(coordinator.address, "a", run="other")
    with pytest.raises(Refused, match="this coordinator runs 'run', not 'other'; check"):
        member.connect()
    member.close()


def test_another_protocol_is_refused_and_both_are_named(coordinator: CoordinatorThread) -> None:
    refused = talk(coordinator, answer(protocol=99))
    assert refused.kind == "protocol"
    assert (
        f"speaks protocol 99 (Atoll 'test'), the coordinator {messages.PROTOCOL}; install the same"
        in refused.reason
    )


@pytest.mark.parametrize("name", ["", "x" * 129, "a\nb"])
def test_a_name_that_would_spoil_a_log_is_refused(coordinator: CoordinatorThread, name: str) -> None:
    assert talk(coordinator, answer(peer=name)).kind == "peer"


def test_a_coordinator_of_another_protocol_is_left_alone(
    coordinator: CoordinatorThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "Challenge", lambda protocol, nonce: Challenge(protocol=99, nonce=nonce))
    member = new_member(coordinator.address, "a")
    with pytest.raises(
        Refused,
        match=f"the coordinator at {coordinator.address} speaks protocol 99, this peer {messages.PROTOCOL}",
    ):
        member.connect()
    member.close()


def test_a_replayed_proof_is_worth_nothing(coordinator: CoordinatorThread) -> None:
    recorded: list[bytes] = []

    async def record(websocket: Socket) -> Any:
        recorded.append(messages.encode(connect(await hear(websocket))))
        await websocket.send_bytes(recorded[0])
        return await hear(websocket)

    async def replay(websocket: Socket) -> Any:
        await hear(websocket)
        await websocket.send_bytes(recorded[0])
        return await hear(websocket)

    assert isinstance(talk(coordinator, record), Welcome)
    assert talk(coordinator, replay).kind == "token"


def test_a_coordinator_without_the_token_is_not_trusted(tmp_path: Path) -> None:
    """It lets everyone in, but cannot prove that it is ours."""
    with CoordinatorThread(tmp_path / "journal", token=b"i" * 32) as impostor:
        member = new_member(impostor.address, "a")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(auth.Handshake, "peer_proof_fits", lambda self, token, proof: True)
            with pytest.raises(
                Refused, match=f"the coordinator at {impostor.address} does not hold this run's token"
            ):
                member.connect()
        member.close()


# ---- nonsense ----------------------------------------------------------------------------------------------


def test_messages_that_are_none_are_shown_out(coordinator: CoordinatorThread) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    too_early = messages.encode(messages.Heartbeat(1, "local"))
    for nonsense in [b"", b"\x00", b"\xc1\x01part", too_early, rng.randbytes(100), rng.randbytes(60_000)]:

        async def said(websocket: Socket, nonsense: bytes = nonsense) -> Any:
            await hear(websocket)
            await websocket.send_bytes(nonsense)
            return await hear(websocket)

        assert talk(coordinator, said) is None
    assert_serves(coordinator)


@pytest.mark.parametrize("size", [10 << 20, 70 << 10], ids=["10MB", "70kB"])
def test_a_huge_first_message_is_not_read(coordinator: CoordinatorThread, size: int) -> None:
    async def said(websocket: Socket) -> Any:
        await hear(websocket)
        try:
            await websocket.send_bytes(bytes(size))
        except ConnectionError:
            return None
        return await hear(websocket)

    assert talk(coordinator, said) is None
    assert_serves(coordinator)


def test_bytes_that_are_no_http_are_shown_out_without_a_log_line(
    coordinator: CoordinatorThread, caplog: pytest.LogCaptureFixture
) -> None:
    for nonsense in [
        os.urandom(1000),
        b"GET / HTTP/1.1\r\nHost: " + b"x" * 20_000,
        b"\x16\x03\x01\x02\x00" * 50,
    ]:
        with socket.create_connection(("127.0.0.1", coordinator.port), timeout=10) as stranger:
            stranger.sendall(nonsense)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []
    assert_serves(coordinator)


def test_there_is_nothing_else_to_see(coordinator: CoordinatorThread) -> None:
    async def look() -> list[tuple[int, str]]:
        found = []
        async with aiohttp.ClientSession() as http:
            for method, path in [("GET", "/"), ("GET", "/v1/peer"), ("GET", "/metrics"), ("POST", "/")]:
                async with http.request(method, f"http://{coordinator.address}{path}") as response:
                    found.append((response.status, await response.text()))
        return found

    assert asyncio.run(look()) == [(200, "atoll coordinator\n")] + 3 * [(404, "nothing here\n")]


# ---- many --------------------------------------------------------------------------------------------------


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_idle_strangers_keep_nobody_out_and_are_shown_out(
    coordinator: CoordinatorThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gate, "PROVE_S", 1.0)
    before = open_descriptors()
    with caplog.at_level(logging.WARNING):
        strangers = [socket.create_connection(("127.0.0.1", coordinator.port)) for _ in range(100)]
        assert_serves(coordinator)
        for stranger in strangers:
            stranger.settimeout(10)
            with stranger, contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""  # shown out, without a word
    deadline_s = time.monotonic() + 5
    while open_descriptors() > before and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert open_descriptors() <= before
    assert len(caplog.records) <= 2, caplog.messages


def test_strangers_beyond_the_limit_cost_the_oldest_its_place(coordinator: CoordinatorThread) -> None:
    """From several sources: one alone cannot take all the places."""
    strangers = [
        socket.create_connection(
            ("127.0.0.1", coordinator.port), source_address=(f"127.0.0.{2 + number % 4}", 0)
        )
        for number in range(gate.MAX_STRANGERS + 1)
    ]
    first, second = strangers[:2]
    first.settimeout(gate.PROVE_S - 1)
    assert first.recv(1) == b""
    second.setblocking(False)
    with pytest.raises(BlockingIOError):
        second.recv(1)
    for stranger in strangers:
        stranger.close()


def test_many_wrong_tokens_cost_one_log_line_and_no_event(
    coordinator: CoordinatorThread, caplog: pytest.LogCaptureFixture
) -> None:
    seen = len(coordinator.events)
    with caplog.at_level(logging.DEBUG, logger="atoll.membership"):
        for _ in range(30):
            talk(coordinator, answer(token=b"x" * 32))
    lines = [text for text in caplog.messages if "turned away" in text]
    assert len(lines) == 1
    assert lines[0].startswith("turned away 1 connections that proved nothing; the latest from 127.0.0.1:")
    assert coordinator.events[seen:] == []


# ---- proven, and then? -------------------------------------------------------------------------------------


def test_a_proven_peer_that_sends_nonsense_is_closed(coordinator: CoordinatorThread) -> None:
    async def said(websocket: Socket) -> Any:
        await websocket.send_bytes(messages.encode(connect(await hear(websocket))))
        assert isinstance(await hear(websocket), Welcome)
        await websocket.send_bytes(b"\x00nonsense")
        while (heard := await hear(websocket)) is not None:
            assert not isinstance(heard, Challenge)
        return heard

    assert talk(coordinator, said) is None
    assert_serves(coordinator)


def test_a_long_declaration_travels_in_parts(coordinator: CoordinatorThread) -> None:
    member = new_member(coordinator.address, "a")
    fake = FakePeer(member, "a")
    layout = tuple(ParameterInfo(f"layers.{i}.attention.weight", (64, 64), "float32") for i in range(20_000))
    fake.join(layout=layout)
    fake.run(rounds=1)
    member.close()


def test_a_peer_that_does_not_read_is_cut_off() -> None:
    aborted: list[bool] = []

    class Transport:
        def get_extra_info(self, name: str) -> tuple[str, int]:
            return ("127.0.0.1", 1)

        def abort(self) -> None:
            aborted.append(True)

    who = auth.Handshake(protocol=1, run="run", peer="a", incarnation="i", server_nonce=b"", client_nonce=b"")
    connection: Any = PeerConnection(object(), Transport(), gate.Proven(who, TOKEN))  # type: ignore[arg-type]
    for _ in range(OUTBOX_MESSAGES):
        connection.send(messages.HeartbeatAck(1))
    assert not aborted
    connection.send(messages.HeartbeatAck(1))
    assert aborted
