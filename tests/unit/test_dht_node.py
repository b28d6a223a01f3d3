"""Nodes of the DHT on one loop: what one stores others find, whatever some of them say."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

pytest.importorskip("kademlia", reason="the extra [dht] is not installed")

from kademlia.node import Node

from atoll.clock import ManualClock
from atoll.network.authority import Authority
from atoll.network.dht_budget import Budget
from atoll.network.dht_node import MOST_ASKED, DhtNode
from atoll.network.dht_protocol import MAX_DATAGRAM, may_tell
from atoll.network.dht_record import key_of, sign
from atoll.network.dht_table import MOST_BUCKETS, NEAREST, BoundedTable

AUTHORITY = Authority.new("run")
KEY = key_of("run", AUTHORITY.fingerprint)
HERE = "127.0.0.1"
LONG_S = 20.0


def record(term: int, port: int = 7070) -> bytes:
    return sign(AUTHORITY, run="run", addresses=[f"10.0.0.5:{port}"], term=term, sequence=0)


@asynccontextmanager
async def nodes(count: int) -> AsyncIterator[list[DhtNode]]:
    """All of them bootstrapped by the first."""
    opened: list[DhtNode] = []
    ports: list[int] = []
    try:
        for _ in range(count):
            node = DhtNode([(HERE, ports[0])] if ports else [])
            opened.append(node)
            ports.append(await node.listen(HERE, 0))
        for node in opened[1:]:
            await node.look_up(node.protocol.source_node.id, LONG_S)
        yield opened
    finally:
        for node in opened:
            node.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(within())


def test_what_one_publishes_every_other_finds() -> None:
    async def test() -> None:
        async with nodes(12) as all_nodes:
            assert all_nodes[3].store.offer(KEY, record(1))
            assert await all_nodes[3].publish(KEY, LONG_S) >= NEAREST
            for node in all_nodes:
                found = await node.look_up(KEY, LONG_S)
                assert found is not None
                assert found.addresses == ("10.0.0.5:7070",)

    run(test)


def test_the_newest_wins_though_most_hold_an_older_one() -> None:
    async def test() -> None:
        async with nodes(8) as all_nodes:
            for node in all_nodes[:7]:
                assert node.store.offer(KEY, record(1))
            assert all_nodes[5].store.offer(KEY, record(2, port=7171))
            found = await all_nodes[7].look_up(KEY, LONG_S)
            assert found is not None
            assert found.age == (2, 0)

    run(test)


def test_a_node_alone_knows_what_it_was_given_and_nothing_else() -> None:
    async def test() -> None:
        async with nodes(1) as (alone,):
            assert await alone.look_up(KEY, LONG_S) is None
            alone.store.offer(KEY, record(1))
            assert await alone.publish(KEY, LONG_S) == 0
            assert await alone.look_up(KEY, LONG_S) is not None

    run(test)


def test_an_ipv6_socket_for_both_families_hears_ipv4() -> None:
    async def test() -> None:
        wide = DhtNode()
        port = await wide.listen("", 0)
        narrow = DhtNode([(HERE, port)])
        await narrow.listen(HERE, 0)
        try:
            narrow.store.offer(KEY, record(1))
            assert await narrow.publish(KEY, LONG_S) == 1
            assert wide.store.get(KEY) == record(1)
        finally:
            wide.close()
            narrow.close()

    run(test)


HEAD = b"\x00" + bytes(20)
JUNK = {
    "size": [b"", b"\x00" * 10, HEAD + bytes(MAX_DATAGRAM)],
    "kind": [b"\x07" + bytes(30)],
    "form": [
        HEAD + b"\xc1",
        HEAD + b"\x91" * 1500,  # deeper than any recursion
        HEAD + b"\xdd\xff\xff\xff\xff",  # an array of 2^32
        HEAD + msgspec.msgpack.encode(["stun", []]),
        HEAD + msgspec.msgpack.encode(["_timeout", [b"x"]]),
        HEAD + msgspec.msgpack.encode(["ping", [b"short"]]),
        HEAD + msgspec.msgpack.encode(["ping", ["a" * 20]]),
        HEAD + msgspec.msgpack.encode(["store", [bytes(20), bytes(20), bytes(1500)]]),
        HEAD + msgspec.msgpack.encode(["find_node", [bytes(20), bytes(21)]]),
        HEAD + msgspec.msgpack.encode(["ping", [bytes(20), bytes(20)]]),
    ],
    "no such call": [b"\x01" + bytes(20) + msgspec.msgpack.encode(True)],
}


@pytest.mark.parametrize("why", JUNK)
def test_what_makes_no_sense_costs_a_count(why: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with nodes(1) as (node,):
            before = asyncio.all_tasks()
            for junk in JUNK[why]:
                node.protocol.datagram_received(junk, ("10.0.0.66", 66))
            assert node.protocol.dropped == {why: len(JUNK[why])}
            assert asyncio.all_tasks() == before

    run(test)
    assert not caplog.records


def test_a_flood_is_not_listened_to_and_takes_no_memory() -> None:
    async def test() -> None:
        clock = ManualClock()
        node = DhtNode(
            clock=clock, budget=Budget(clock, source=(1.0, 10.0), all_sources=(1.0, 50.0), most_sources=16)
        )
        await node.listen(HERE, 0)
        try:
            for number in range(2000):
                call = msgspec.msgpack.encode(["ping", [os.urandom(20)]])
                node.protocol.datagram_received(HEAD + call, (f"10.0.{number // 250}.{number % 250}", 66))
            for _ in range(100):
                call = msgspec.msgpack.encode(["store", [os.urandom(20), os.urandom(20), os.urandom(500)]])
                node.protocol.datagram_received(HEAD + call, ("10.0.0.66", 66))
            assert node.protocol.dropped["too many"] == 2050
            assert len(node.protocol._budget) <= 16
            assert len(node.protocol._checks) <= 16
            assert len(node.protocol.router) == 0, "who has not answered is no contact"
            assert len(node.store) == 0
        finally:
            node.close()

    run(test)


def test_the_table_does_not_grow_with_ids_that_were_chosen_for_it() -> None:
    asked: list[Node] = []

    class Checker:
        def check(self, node: Node) -> None:
            asked.append(node)

    table = BoundedTable(Checker(), Node(bytes(20)))
    for bits in range(160):  # ever nearer to the own id, and clusters far away from it
        for low in range(50):
            table.add_contact(Node(((1 << bits) | low).to_bytes(20, "big"), "10.0.0.1", 1))
            table.add_contact(
                Node(((1 << 159) | (low << bits) % (1 << 159)).to_bytes(20, "big"), "10.0.0.1", 1)
            )
    assert len(table.buckets) <= MOST_BUCKETS
    assert len(table) <= MOST_BUCKETS * 6 * NEAREST
    assert asked, "the oldest of a full bucket is asked whether it is there"


def test_nobody_takes_a_contacts_place_by_claiming_its_id() -> None:
    async def test() -> None:
        async with nodes(2) as (first, second):
            genuine = first.protocol.router.find_neighbors(Node(KEY))[0]
            assert genuine.id == second.protocol.source_node.id
            first.protocol.router.add_contact(Node(genuine.id, "10.0.0.66", 66))
            assert [node.ip for node in first.protocol.router.find_neighbors(Node(KEY))] == [HERE]

    run(test)


def test_a_walk_ends_though_every_answer_names_nodes_that_are_nearer() -> None:
    async def test() -> None:
        async with nodes(2) as (hostile, node):
            made_up = 0

            def many(sender: object, nodeid: bytes, key: bytes) -> list[tuple[bytes, str, int]]:
                nonlocal made_up
                port = hostile.protocol.transport._transport.get_extra_info("sockname")[1]
                made_up += NEAREST
                return [
                    (key[:-8] + (made_up + index).to_bytes(8, "big"), HERE, port) for index in range(NEAREST)
                ]

            hostile.protocol.hear_find_node = many
            node.store.offer(KEY, record(1))
            await node.publish(KEY, LONG_S)
            assert made_up >= MOST_ASKED, "it made up as many as it liked"

    run(test)


@pytest.mark.parametrize(
    ("teller", "told", "may"),
    [
        ("10.0.0.1", "10.0.0.2", True),
        ("10.0.0.1", "127.0.0.1", False),
        ("10.0.0.1", "::1", False),
        ("10.0.0.1", "::ffff:127.0.0.1", False),
        ("10.0.0.1", "::ffff:10.0.0.2", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("10.0.0.1", "evil.example.org", False),
        ("10.0.0.1", "255.255.255.255", False),
        ("10.0.0.1", "224.0.0.1", False),
        ("10.0.0.1", "0.0.0.0", False),
        ("2001:db8::1", "2001:db8::2", True),
    ],
)
def test_whom_strangers_may_send_us_to(teller: str, told: str, may: bool) -> None:
    assert may_tell(teller, told) is may
