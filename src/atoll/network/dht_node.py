"""A node of the DHT: holds records for others, looks one up, publishes one. On the event loop of whoever opens it.

**A look-up believes no majority.** It walks towards the key as Kademlia does, but asks every node on its way for nodes
*and* for a value, offers every value to the store, which ignores the bad ones, and goes on to the end. So one honest
node that is reached, and has the newest record, suffices; bootstrap nodes are asked each time, whoever is nearer.

This module needs the extra [dht]; `network.dht` imports it when a node is opened.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from kademlia.node import Node

from atoll.clock import Clock, MonotonicClock
from atoll.network.dht_budget import Budget
from atoll.network.dht_protocol import GuardedProtocol, home
from atoll.network.dht_record import KEY_BYTES, Record
from atoll.network.dht_store import RecordStore
from atoll.network.dht_table import NEAREST

AT_ONCE = 8
MOST_ASKED = 64
"""Nodes that one walk asks; those that hostile ones make up end here."""


@dataclass(slots=True)
class Walk:
    """What one walk towards a key found: nodes that answered, and how many of them had a value."""

    key: bytes
    answered: dict[bytes, Node] = field(default_factory=dict)
    known: dict[bytes, Node] = field(default_factory=dict)
    asked: set[bytes] = field(default_factory=set)
    num_values: int = 0

    def note(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self.known.setdefault(node.id, node)

    def next(self, first: Sequence[Node] = ()) -> list[Node]:
        """Who is asked next: `first`, then of the nearest that were not found dead those that were not asked."""
        target = Node(self.key)
        alive = [
            node for node in self.known.values() if node.id not in self.asked or node.id in self.answered
        ]
        nearest = sorted(alive, key=target.distance_to)[:NEAREST]
        wave = {node.id: node for node in (*first, *nearest) if node.id not in self.asked}
        return list(wave.values())[: min(AT_ONCE, MOST_ASKED - len(self.asked))]

    def nearest_answered(self) -> list[Node]:
        return sorted(self.answered.values(), key=Node(self.key).distance_to)[:NEAREST]


class DhtNode:
    """`bootstrap` may be changed at any time: (IP address, port) of nodes that lead into the DHT."""

    def __init__(
        self,
        bootstrap: Sequence[tuple[str, int]] = (),
        *,
        clock: Clock | None = None,
        store: RecordStore | None = None,
        budget: Budget | None = None,
    ) -> None:
        clock = clock or MonotonicClock()
        self.bootstrap = tuple(bootstrap)
        self.store = RecordStore(clock) if store is None else store
        self.protocol = GuardedProtocol(Node(secrets.token_bytes(KEY_BYTES)), self.store, clock, budget)
        self._transport: asyncio.DatagramTransport | None = None

    async def listen(self, host: str, port: int) -> int:
        """Begin to serve; returns the port. Raises OSError if it cannot be had."""
        loop = asyncio.get_running_loop()
        sock = _bound(host, port)
        try:
            self._transport, _ = await loop.create_datagram_endpoint(lambda: self.protocol, sock=sock)
        except BaseException:
            sock.close()
            raise
        return int(sock.getsockname()[1])

    async def look_up(self, key: bytes, within_s: float) -> Record | None:
        """The newest valid record that anybody has, this node included; None if there is none in `within_s`."""
        await self._walk(key, within_s)
        return self.store.newest(key)

    async def publish(self, key: bytes, within_s: float) -> int:
        """Give the newest record to the nodes nearest to its key, and to the bootstrap nodes; how many took it."""
        walk = await self._walk(key, within_s)
        value = self.store.get(key)
        if value is None:
            return 0
        takers = {node.id: node for node in walk.nearest_answered()}
        here = set(self.bootstrap)
        takers |= {node.id: node for node in walk.answered.values() if home(node) in here}
        taken = await asyncio.gather(*(self.protocol.give(node, key, value) for node in takers.values()))
        return sum(taken)

    def close(self) -> None:
        """Give the socket back at once. Idempotent."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        self.protocol.end()

    async def _walk(self, key: bytes, within_s: float) -> Walk:
        walk = Walk(key)
        try:
            async with asyncio.timeout(within_s):
                found = await asyncio.gather(*(self.protocol.identify(each) for each in self.bootstrap))
                first = [
                    node for node in found if node is not None and node.id != self.protocol.source_node.id
                ]
                walk.note(first)
                walk.note(self.protocol.router.find_neighbors(Node(key)))
                while wave := walk.next(first):
                    await self._ask_all(walk, wave)
        except TimeoutError:
            pass  # what was found by then counts
        return walk

    async def _ask_all(self, walk: Walk, wave: Sequence[Node]) -> None:
        walk.asked |= {node.id for node in wave}

        async def ask(node: Node) -> None:
            heard = await self.protocol.ask(node, walk.key)
            if heard is None:
                return
            near, value = heard
            walk.answered[node.id] = node
            walk.note(near)
            if value is not None:
                walk.num_values += 1
                self.store.offer(walk.key, value, home(node)[0])

        await asyncio.gather(*(ask(node) for node in wave))


def _bound(host: str, port: int) -> socket.socket:
    """A UDP socket at an address of this machine; "": at all of them, of both families where there are two."""
    family = socket.AF_INET6 if ":" in host or (not host and socket.has_dualstack_ipv6()) else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        if not host and family is socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((host, port))
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock
