"""Two paths to a peer: measured between the two that hold the keys, and the faster one chosen."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from atoll.network import path_rates
from atoll.network.path_rates import (
    AGAIN_S,
    OLD_S,
    BusyError,
    Choice,
    RateServer,
    choose,
    measure,
    order,
    worth_measuring,
)
from atoll.network.wireguard_keys import new_key_pair

MINE, THEIRS, STRANGER = new_key_pair(), new_key_pair(), new_key_pair()


@pytest.mark.parametrize(
    ("direct", "vpn", "held", "path", "says"),
    [
        (100.0, 95.0, None, "vpn", "about as fast as"),
        (100.0, 80.0, None, "direct", "1.2 times as fast as the vpn one"),
        (100.0, 0.0, None, "direct", "the vpn path is not reached"),
        (0.0, 50.0, None, "vpn", "the direct path is not reached"),
        (0.0, 0.0, "direct", "vpn", "neither path was reached"),
        (100.0, 105.0, "direct", "direct", "about as fast as"),
        (100.0, 111.0, "direct", "vpn", "times as fast"),
        (0.0, 50.0, "direct", "vpn", "the direct path is not reached"),
    ],
)
def test_the_faster_path_is_chosen_and_a_little_faster_is_not(
    direct: float, vpn: float, held: str | None, path: str, says: str
) -> None:
    before = Choice(held, "", 1.0, 1.0, 0.0) if held else None
    choice = choose(direct, vpn, 5.0, before)
    assert (choice.path, choice.measured_s) == (path, 5.0)
    assert says in choice.reason


def test_it_is_measured_again_when_the_engine_s_rate_drops() -> None:
    assert worth_measuring(None, 0.0, 0.0)[0] == "never measured"
    held = choose(100.0, 90.0, 0.0)
    for now_s, rate in ((1.0, 50.0), (2.0, 80.0), (AGAIN_S + 1, 41.0)):
        reason, after = worth_measuring(held, rate, now_s)
        assert reason == ""
        assert after is not None
        held = after
    assert held.best_seen == 80.0
    assert worth_measuring(held, 39.0, AGAIN_S - 1)[0] == "", "not so soon again"
    assert worth_measuring(held, 39.0, AGAIN_S + 2)[0] == "its rate fell to 49% of the best"
    assert worth_measuring(held, 0.0, AGAIN_S + 2)[0] == "", "nothing is known of a link"
    assert "30 min ago" in worth_measuring(held, 80.0, OLD_S + 1)[0]
    assert worth_measuring(choose(0.0, 0.0, 0.0), 0.0, AGAIN_S + 1)[0] == "not reached last time"


def test_the_order_of_addresses_follows_the_choice() -> None:
    assert order(None, "192.0.2.1", "fd00::1") == ("fd00::1", "192.0.2.1")
    assert order(choose(100.0, 50.0, 0.0), "192.0.2.1", "fd00::1") == ("192.0.2.1", "fd00::1")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_rates, "SEND_S", 0.3)
    monkeypatch.setattr(path_rates, "PROVE_S", 1.0)


def served(talk: Callable[[RateServer, str, int], Awaitable[None]]) -> None:
    """A server of THEIRS whose only other member is MINE."""

    async def run() -> None:
        server = RateServer(THEIRS, lambda public: public == MINE.public)
        listener = await asyncio.start_server(server.attend, "127.0.0.1", 0)
        try:
            async with asyncio.timeout(30):
                await talk(server, *listener.sockets[0].getsockname())
        finally:
            listener.close()

    asyncio.run(run())


def test_members_measure() -> None:
    async def talk(server: RateServer, host: str, port: int) -> None:
        rate, why = await measure(MINE, THEIRS.public, host, port)
        assert not why
        assert rate > 0
        rate, why = await measure(MINE, THEIRS.public, host, port)
        assert rate > 0, why

    served(talk)


def test_strangers_and_impostors_are_refused() -> None:
    async def talk(server: RateServer, host: str, port: int) -> None:
        assert await measure(STRANGER, THEIRS.public, host, port) == (0.0, "it closed the connection")
        assert await measure(MINE, STRANGER.public, host, port) == (0.0, "it is not that peer")
        for speech in (b"", b"GET / HTTP/1.1\r\n\r\n" * 20, b"\0" * 500):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(speech)
            assert await reader.read() == b"", "not a byte for who proves nothing"
            writer.close()

    served(talk)


def test_one_member_is_served_at_a_time() -> None:
    async def talk(server: RateServer, host: str, port: int) -> None:
        server._served, server._serving = 1, STRANGER.public
        with pytest.raises(BusyError):
            await measure(MINE, THEIRS.public, host, port)
        server._served = 0
        assert (await measure(MINE, THEIRS.public, host, port))[0] > 0

    served(talk)


def test_so_many_strangers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_rates, "MAX_STRANGERS", 3)

    async def talk(server: RateServer, host: str, port: int) -> None:
        silent = [await asyncio.open_connection(host, port) for _ in range(3)]
        while server._strangers < 3:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection(host, port)
        assert await reader.read() == b"", "turned away at once"
        writer.close()
        for reader, writer in silent:
            assert await reader.read() == b"", "and the silent ones in time"
            writer.close()
        assert server._strangers == 0

    served(talk)


def test_an_address_where_nobody_listens_is_no_path() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rate, why = asyncio.run(measure(MINE, THEIRS.public, "127.0.0.1", port))
    assert (rate, bool(why)) == (0.0, True)
