"""Operators over real sockets: the proof of the token is their own, and nobody without it is told or obeyed."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from atoll import events
from atoll.errors import ConfigError, Dismissed, Refused, Unreachable
from atoll.membership import auth, messages, operator_link, status
from atoll.membership.messages import Challenge, Connect
from atoll.membership.operator import (
    Done,
    EvictPeer,
    LeavePeer,
    OperatorConnect,
    OperatorWelcome,
    Status,
    StatusWanted,
    StopRun,
    decode_reply,
)
from atoll.membership.operator_link import ask_status, give_order
from support.fake_peer import TOKEN, CoordinatorThread, FakePeer, new_member
from support.slack import SLACK_S

Socket = aiohttp.ClientWebSocketResponse
HANDSHAKE = {"protocol": messages.PROTOCOL, "client_nonce": b"n" * 32}


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorThread]:
    with CoordinatorThread(tmp_path / "journal", start_peers=2) as running:
        yield running


def talk(
    coordinator: CoordinatorThread, path: str, said: Callable[[Socket, Challenge], Awaitable[Any]]
) -> Any:
    """What `said` returns of a raw WebSocket conversation on a path, after the challenge."""

    async def conversation() -> Any:
        async with aiohttp.ClientSession() as http:
            async with http.ws_connect(f"http://{coordinator.address}{path}", max_msg_size=0) as websocket:
                try:
                    async with asyncio.timeout(10):
                        challenge = await hear(websocket)
                        assert isinstance(challenge, Challenge)
                        return await said(websocket, challenge)
                finally:  # aiohttp leaves the connection open once the other side has hung up
                    websocket._response.close()

    return asyncio.run(conversation())


async def hear(websocket: Socket) -> Any:
    """The next message; None when the coordinator closed."""
    frame = await websocket.receive()
    return decode_reply(frame.data) if frame.type is aiohttp.WSMsgType.BINARY else None


def operator_proof(challenge: Challenge, token: bytes = TOKEN) -> bytes:
    return auth.OperatorHandshake(server_nonce=challenge.nonce, **HANDSHAKE).operator_proof(token)


def peer_proof(challenge: Challenge) -> bytes:
    about = {"run": "run", "peer": "a", "incarnation": "i"}
    return auth.Handshake(server_nonce=challenge.nonce, **HANDSHAKE, **about).peer_proof(TOKEN)


# ---- who is let in -----------------------------------------------------------------------------------------


def test_the_token_gives_the_status(coordinator: CoordinatorThread) -> None:
    found = ask_status(coordinator.address, TOKEN)
    assert (found.run, found.started, found.peers) == ("run", False, ())
    assert found.waiting in ("", "waiting for peers: 0 of 2 declared (nobody)"), "its first tick comes soon"


def test_a_wrong_token_is_refused(coordinator: CoordinatorThread) -> None:
    with pytest.raises(Refused, match="the run token does not fit") as caught:
        ask_status(coordinator.address, b"x" * 32)
    assert caught.value.exit_code == 5
    with pytest.raises(ConfigError, match="the run token has 3 characters"):
        ask_status(coordinator.address, b"xxx")


def test_a_peer_s_proof_is_worth_nothing_at_the_operators_door(coordinator: CoordinatorThread) -> None:
    async def said(websocket: Socket, challenge: Challenge) -> Any:
        proof = peer_proof(challenge)
        connect = OperatorConnect(messages.PROTOCOL, "test", b"n" * 32, proof)
        await websocket.send_bytes(messages.encode(connect))
        return await hear(websocket)

    refused = talk(coordinator, "/v1/operator", said)
    assert (type(refused), refused.kind) == (messages.Refused, "token")


def test_an_operator_s_proof_is_worth_nothing_at_the_peers_door(coordinator: CoordinatorThread) -> None:
    async def said(websocket: Socket, challenge: Challenge) -> Any:
        proof = operator_proof(challenge)
        connect = Connect(messages.PROTOCOL, "test", "run", "a", "i", b"n" * 32, proof)
        await websocket.send_bytes(messages.encode(connect))
        frame = await websocket.receive()
        return messages.decode_from_coordinator(frame.data)

    refused = talk(coordinator, "/v1/peer", said)
    assert (type(refused), refused.kind) == (messages.Refused, "token")


def test_a_proof_for_one_challenge_is_worth_nothing_for_another(coordinator: CoordinatorThread) -> None:
    proofs: list[bytes] = []

    async def said(websocket: Socket, challenge: Challenge) -> Any:
        proofs.append(operator_proof(challenge))
        connect = OperatorConnect(messages.PROTOCOL, "test", b"n" * 32, proofs[0])
        await websocket.send_bytes(messages.encode(connect))
        return await hear(websocket)

    assert isinstance(talk(coordinator, "/v1/operator", said), OperatorWelcome)
    assert isinstance(talk(coordinator, "/v1/operator", said), messages.Refused)


@pytest.mark.parametrize("request_", [StopRun("x"), LeavePeer("a", ""), StatusWanted()])
def test_an_order_before_the_proof_is_no_order(coordinator: CoordinatorThread, request_: Any) -> None:
    async def said(websocket: Socket, challenge: Challenge) -> Any:
        await websocket.send_bytes(messages.encode(request_))
        return await hear(websocket)

    assert talk(coordinator, "/v1/operator", said) is None
    assert not ask_status(coordinator.address, TOKEN).stopping


def test_who_proves_and_then_says_nothing_is_shown_out(
    coordinator: CoordinatorThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.membership.operator_door.ANSWER_S", 0.3)

    async def said(websocket: Socket, challenge: Challenge) -> Any:
        connect = OperatorConnect(messages.PROTOCOL, "test", b"n" * 32, operator_proof(challenge))
        await websocket.send_bytes(messages.encode(connect))
        assert isinstance(await hear(websocket), OperatorWelcome)
        return await hear(websocket)

    begun_s = time.monotonic()
    assert talk(coordinator, "/v1/operator", said) is None
    assert time.monotonic() - begun_s < 0.3 + SLACK_S


def test_an_impostor_without_the_token_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers every proof with a welcome of its own."""

    async def impostor(request: web.BaseRequest) -> web.StreamResponse:
        websocket = web.WebSocketResponse()
        await websocket.prepare(request)
        await websocket.send_bytes(messages.encode(Challenge(messages.PROTOCOL, b"s" * 32)))
        await websocket.receive()
        await websocket.send_bytes(messages.encode(OperatorWelcome(proof=b"p" * 32)))
        heard.append(await websocket.receive())
        return websocket

    heard: list[Any] = []

    async def conversation() -> None:
        server = web.Server(impostor)
        runner = web.ServerRunner(server)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address = "{}:{}".format(*runner.addresses[0][:2])
        try:
            with pytest.raises(Refused, match="does not hold this run's token"):
                await operator_link.ask(address, TOKEN, StopRun("x"))
        finally:
            await runner.cleanup()

    asyncio.run(conversation())
    assert all(frame.type is not aiohttp.WSMsgType.BINARY for frame in heard)


# ---- nobody there --------------------------------------------------------------------------------------------


def test_a_coordinator_that_is_not_there_is_one_line_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    begun_s = time.monotonic()
    with pytest.raises(
        Unreachable, match=f"no coordinator at {address} .connection refused.; check"
    ) as caught:
        ask_status(address, TOKEN)
    assert caught.value.exit_code == 4
    assert time.monotonic() - begun_s < SLACK_S


def test_a_port_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_link, "ASK_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun_s = time.monotonic()
        with pytest.raises(Unreachable, match=r"no answer in 0\.5 s"):
            ask_status(f"127.0.0.1:{silent.getsockname()[1]}", TOKEN)
    assert time.monotonic() - begun_s < 0.5 + SLACK_S


def test_the_whole_wait_is_shorter_than_a_person_s_patience() -> None:
    assert operator_link.ASK_S + operator_link.CLOSE_S < 15


# ---- orders --------------------------------------------------------------------------------------------------


def in_thread(fake: FakePeer) -> threading.Thread:
    """Join, and keep what ended it in `fake.ended`."""

    def run() -> None:
        try:
            fake.join()
            fake.run(rounds=1_000_000)
        except BaseException as error:
            fake.ended = error  # type: ignore[attr-defined]
        finally:
            fake.member.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_a_stop_before_the_start_sends_everybody_away_and_is_answered(tmp_path: Path) -> None:
    with CoordinatorThread(tmp_path / "journal", start_peers=2) as coordinator:
        fake = FakePeer(new_member(coordinator.address, "a"), "a")
        thread = in_thread(fake)
        coordinator.seen(events.PeerJoined)
        done = give_order(coordinator.address, TOKEN, StopRun("wrong recipe"))
        assert done == Done(True, "the run had not started; it is over, and all peers are sent away")
        thread.join(10)
        code, reason = coordinator.wait()
    ended = fake.ended  # type: ignore[attr-defined]
    assert isinstance(ended, Dismissed)
    assert str(ended) == "the run was stopped by an operator: wrong recipe"
    assert (code, reason) == (0, "the run was stopped by an operator: wrong recipe")


def test_an_evicted_peer_ends_and_its_next_process_is_refused(tmp_path: Path) -> None:
    with CoordinatorThread(tmp_path / "journal", start_peers=1) as coordinator:
        fake = FakePeer(new_member(coordinator.address, "a"), "a", reduce_s=0.05)
        thread = in_thread(fake)
        coordinator.seen(events.RoundCommitted)
        assert give_order(coordinator.address, TOKEN, EvictPeer("a", "", 30.0)).ok
        thread.join(10)
        ended = fake.ended  # type: ignore[attr-defined]
        assert isinstance(ended, Refused)
        assert "'a' was evicted and is refused for another 30 s" in str(ended)
        again = FakePeer(new_member(coordinator.address, "a"), "a")
        with pytest.raises(Refused, match="'a' was evicted and is refused for another"):
            again.join()
        again.member.close()


def test_a_mistake_is_answered_and_changes_nothing(coordinator: CoordinatorThread) -> None:
    done = give_order(coordinator.address, TOKEN, LeavePeer("x", ""))
    assert done == Done(False, "this run has no peer 'x'; its peers are: none")


def test_many_ask_at_once_and_all_are_answered(coordinator: CoordinatorThread) -> None:
    async def ask_all() -> list[Status | Done]:
        asked = [operator_link.ask(coordinator.address, TOKEN, StatusWanted()) for _ in range(50)]
        return await asyncio.gather(*asked)

    assert {type(each) for each in asyncio.run(ask_all())} == {Status}


def test_a_long_status_travels_in_parts(
    coordinator: CoordinatorThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = status.report

    def long_report(state: Any, now_s: float) -> Status:
        found = whole(state, now_s)
        return type(found)(
            **{**{n: getattr(found, n) for n in found.__struct_fields__}, "waiting": "x" * 200_000}
        )

    monkeypatch.setattr(status, "report", long_report)
    assert len(ask_status(coordinator.address, TOKEN).waiting) == 200_000
