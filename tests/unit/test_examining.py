"""Examinations over real sockets: what the coordinator tells, whom it dials, and that it is bounded."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from atoll import __version__
from atoll.errors import ConfigError, Refused, Unreachable
from atoll.membership import examining, messages, service
from atoll.membership.examination import (
    EXAMINATION_PATH,
    DialBack,
    DialedBack,
    Examined,
    ExamineMe,
    MemberSeen,
    decode_answer,
)
from atoll.membership.examining import MOST_A_MINUTE, ExaminationDoor, dial_back
from atoll.membership.examining_link import examine
from atoll.membership.link import dial, open_http
from atoll.membership.operator_link import Conversation, ask_status
from atoll.membership.register import Token
from atoll.values import RankInfo
from support.fake_peer import TOKEN, CoordinatorThread, FakePeer, new_member
from support.slack import SLACK_S


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorThread]:
    with CoordinatorThread(tmp_path / "journal", start_peers=1) as running:
        yield running


def listener(host: str = "127.0.0.1") -> socket.socket:
    found = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        found.setsockopt(socket.SOL_SOCKET, option, 1)
    found.bind((host, 0))
    found.listen()
    found.setblocking(False)
    return found


def test_it_tells_what_it_sees_and_dials_back(coordinator: CoordinatorThread) -> None:
    own = listener()
    port = own.getsockname()[1]
    found = asyncio.run(examine(coordinator.address, TOKEN, own))
    assert (found.told.run, found.told.package) == ("run", __version__)
    assert (found.own_host, found.told.seen_host, found.coordinator_host) == ("127.0.0.1",) * 3
    assert found.dialed == (DialedBack(port, True, ""),)
    assert found.mapped == (("127.0.0.1", port), ("127.0.0.1", port)), (
        "seen from two ports of the coordinator"
    )
    assert abs(found.ahead_s) <= found.rtt_s
    with pytest.raises(OSError, match="Bad file descriptor"):
        own.getsockname()


def test_members_and_what_a_round_moves_are_told(coordinator: CoordinatorThread) -> None:
    member = FakePeer(new_member(coordinator.address, "bern"), "bern")
    try:
        member.join()
        told = asyncio.run(examine(coordinator.address, TOKEN, None)).told
        assert told.members == (MemberSeen("bern", RankInfo("127.0.0.1", 0, ())),)
        assert (told.num_members, told.elements, told.codec) == (1, 6, "int8")
        assert told.wire_bytes == 10
        before = ask_status(coordinator.address, TOKEN)
        assert [each.peer for each in before.peers] == ["bern"], "an examination is no peer"
    finally:
        member.member.close()


def test_a_shifted_clock_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = partial(ExaminationDoor, wall_time_s=lambda: time.time() + 600)
    monkeypatch.setattr(service, "ExaminationDoor", ahead)
    with CoordinatorThread(tmp_path / "journal") as coordinator:
        found = asyncio.run(examine(coordinator.address, TOKEN, None))
    assert found.ahead_s == pytest.approx(600, abs=found.rtt_s)


def test_without_the_token_nothing_is_told(coordinator: CoordinatorThread) -> None:
    with pytest.raises(Refused, match="the run token does not fit"):
        asyncio.run(examine(coordinator.address, b"x" * 32, listener()))
    with pytest.raises(ConfigError, match="the run token has 3 characters"):
        asyncio.run(examine(coordinator.address, b"xxx", None))


def test_nobody_there_is_named_with_each_address() -> None:
    closed = socket.socket()
    closed.bind(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    with pytest.raises(Unreachable, match=rf"127.0.0.1:{port} \(connection refused\); .*\[::1\]:{port}"):
        asyncio.run(examine(f"127.0.0.1:{port},[::1]:{port}", TOKEN, None))
    closed.close()


def test_who_does_not_answer_is_given_up_in_time() -> None:
    silent = listener()
    began_s = time.monotonic()
    with pytest.raises(Unreachable, match="no answer in 5 s"):
        asyncio.run(examine(f"127.0.0.1:{silent.getsockname()[1]}", TOKEN, None))
    assert time.monotonic() - began_s < 5 + 1 + SLACK_S
    silent.close()


# ---- the coordinator dials nobody else, and not for ever ---------------------------------------------------------


def test_something_else_at_the_port_is_not_taken_for_the_asker() -> None:
    async def wrong(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"e" * 32)
        await writer.drain()
        writer.close()

    async def dialed() -> DialedBack:
        server = await asyncio.start_server(wrong, "127.0.0.2", 0)
        try:
            return await dial_back("127.0.0.2", server.sockets[0].getsockname()[1], b"n" * 32)
        finally:
            server.close()

    found = asyncio.run(dialed())
    assert not found.reached


@pytest.mark.parametrize("port", [0, 22, 1023, 65536, -1])
def test_low_ports_are_not_dialled(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> bytes:
        raise AssertionError("it dialled")

    monkeypatch.setattr(examining, "_ask", never)
    assert asyncio.run(dial_back("127.0.0.1", port, b"n" * 32)).reached is False


def test_only_the_source_of_the_connection_is_dialled(coordinator: CoordinatorThread) -> None:
    """An order names a port and no host: what else it says is ignored."""
    elsewhere = listener("127.0.0.3")

    async def ask() -> object:
        http = open_http()
        try:
            websocket = await dial(http, coordinator.address, EXAMINATION_PATH)
            conversation = Conversation(websocket, decode_answer)
            await conversation.prove(coordinator.address, Token("", TOKEN))
            await conversation.say(ExamineMe(b"n" * 32))
            await conversation.expect(Examined)
            order = msgspec.msgpack.decode(messages.encode(DialBack(elsewhere.getsockname()[1])))
            await websocket.send_bytes(msgspec.msgpack.encode(order | {"host": "127.0.0.3"}))
            return await conversation.expect(DialedBack)
        finally:
            await http.close()

    told = asyncio.run(ask())
    assert told == DialedBack(elsewhere.getsockname()[1], False, "not reached")
    with pytest.raises(BlockingIOError):
        elsewhere.accept()
    elsewhere.close()


def test_mapping_ports_say_nothing_to_who_has_no_nonce(coordinator: CoordinatorThread) -> None:
    """And they are closed when the examination is over, with whoever is there."""

    async def ask() -> bytes:
        http = open_http()
        try:
            websocket = await dial(http, coordinator.address, EXAMINATION_PATH)
            conversation = Conversation(websocket, decode_answer)
            await conversation.prove(coordinator.address, Token("", TOKEN))
            await conversation.say(ExamineMe(b"n" * 32))
            (port, _) = (await conversation.expect(Examined)).mapping_ports
            said = await hear(*await asyncio.open_connection("127.0.0.1", port), b"x" * 32)
            silent = await asyncio.open_connection("127.0.0.1", port)
            await websocket.close()
            assert await hear(*silent, b"") == b""
        finally:
            await http.close()
        while await is_open(port):
            await asyncio.sleep(0.01)
        return said

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, words: bytes) -> bytes:
        try:
            writer.write(words)
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    async def is_open(port: int) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            return False
        writer.close()
        return True

    async def bounded() -> bytes:
        async with asyncio.timeout(10):
            return await ask()

    assert asyncio.run(bounded()) == b""


def test_one_source_is_examined_once_at_a_time_and_not_for_ever(coordinator: CoordinatorThread) -> None:
    async def many() -> list[object]:
        http = open_http()
        try:
            websocket = await dial(http, coordinator.address, EXAMINATION_PATH)
            conversation = Conversation(websocket, decode_answer)
            await conversation.prove(coordinator.address, Token("", TOKEN))
            await conversation.say(ExamineMe(b"n" * 32))
            await conversation.expect(Examined)  # it is being examined, and says nothing more
            with pytest.raises(Refused, match="examines 1 machines already"):
                await examine(coordinator.address, TOKEN, None)
            await websocket.close()
        finally:
            await http.close()
        found: list[object] = []
        while len(found) < MOST_A_MINUTE:
            try:
                found.append(await examine(coordinator.address, TOKEN, None))
            except Refused as error:
                if "already" not in str(
                    error
                ):  # the one before is just ending, and such a refusal does not count
                    found.append(str(error))
        return found

    found = asyncio.run(many())
    assert not isinstance(found[-2], str)
    assert str(found[-1]) == f"{MOST_A_MINUTE} examinations a minute from 127.0.0.1; ask again in a minute"
