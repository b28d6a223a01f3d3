"""What a node of the DHT says and hears: Kademlia's four calls over UDP, between strangers.

The `kademlia` library gives the wire format, the routing table and the calls; it trusts whoever speaks, so all that
comes in passes here first (decision 026 lists what was found). A datagram is bounded in size, in number per source and
in all, and decoded by `msgspec` into exactly the arguments of its call; nothing it holds makes a task, a line of log or
an exception of ours. A contact is believed once it has answered under the id that it claims.

This module needs the extra [dht]; `network.dht` imports it when a node is opened.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from typing import Annotated, Any, Final

import msgspec
from kademlia.node import Node
from kademlia.protocol import KademliaProtocol

from atoll.clock import Clock
from atoll.network.dht_budget import Budget
from atoll.network.dht_record import KEY_BYTES, MAX_BYTES
from atoll.network.dht_store import RecordStore
from atoll.network.dht_table import NEAREST, BoundedTable

MAX_DATAGRAM: Final = 2048
ANSWER_S: Final = 1.5
"""What does not answer by then is not there. The next look-up asks again."""
MOST_CHECKS: Final = 16
"""Newcomers that are asked back at one time."""
_HEAD: Final = 21  # a byte for the kind and 20 for the call's number

_Id = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_Value = Annotated[bytes, msgspec.Meta(max_length=MAX_BYTES)]
_Contact = tuple[
    _Id, Annotated[str, msgspec.Meta(max_length=45)], Annotated[int, msgspec.Meta(gt=0, lt=65536)]
]
_Answer = bool | _Id | Annotated[list[_Contact], msgspec.Meta(max_length=64)] | dict[str, _Value]

_call = msgspec.msgpack.Decoder(tuple[Annotated[str, msgspec.Meta(max_length=16)], msgspec.Raw])
_answer = msgspec.msgpack.Decoder(_Answer)
_ARGUMENTS: Final[dict[str, msgspec.msgpack.Decoder[Any]]] = {
    "ping": msgspec.msgpack.Decoder(tuple[_Id]),
    "store": msgspec.msgpack.Decoder(tuple[_Id, _Id, _Value]),
    "find_node": msgspec.msgpack.Decoder(tuple[_Id, _Id]),
    "find_value": msgspec.msgpack.Decoder(tuple[_Id, _Id]),
}

Sender = tuple[str, int]


class GuardedProtocol(KademliaProtocol):
    """For one event loop. `dropped` counts datagrams that were not listened to, by reason (a fixed set)."""

    def __init__(self, own: Node, store: RecordStore, clock: Clock, budget: Budget | None = None) -> None:
        super().__init__(own, store, NEAREST)
        self._wait_timeout = ANSWER_S
        self._checks: dict[bytes, asyncio.Task[None]] = {}
        self._budget = Budget(clock) if budget is None else budget
        self.router = BoundedTable(self, own)
        self.dropped: Counter[str] = Counter()

    # ---- the socket ----------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = self._outgoing = _Outgoing(transport)  # type: ignore[bad-override-mutable-attribute]

    def datagram_received(self, data: bytes, addr: Any) -> None:
        sender = _plain(addr)
        if not _HEAD < len(data) <= MAX_DATAGRAM:
            self.dropped["size"] += 1
        elif data[0] == 1:
            self._take_answer(data)
        elif data[0] != 0:
            self.dropped["kind"] += 1
        elif not self._budget.allows(sender[0]):
            self.dropped["too many"] += 1
        else:
            self._serve(data, sender)

    def _serve(self, data: bytes, sender: Sender) -> None:
        try:
            name, raw = _call.decode(data[_HEAD:])
            arguments = _ARGUMENTS[name].decode(raw)
        except (msgspec.MsgspecError, KeyError, RecursionError):
            self.dropped["form"] += 1
            return
        answer = getattr(self, f"hear_{name}")(sender, *arguments)
        self._outgoing.sendto(b"\x01" + data[1:_HEAD] + msgspec.msgpack.encode(answer), sender)

    def _take_answer(self, data: bytes) -> None:
        """Numbers of calls are random, 160 bits: who knows one has seen the call."""
        waiting, timer = self._outstanding.get(data[1:_HEAD], (None, None))
        if waiting is None:
            self.dropped["no such call"] += 1
            return
        timer.cancel()
        del self._outstanding[data[1:_HEAD]]
        try:
            heard = True, _answer.decode(data[_HEAD:])
        except (msgspec.MsgspecError, RecursionError):
            self.dropped["form"] += 1
            heard = False, None
        if not waiting.done():
            waiting.set_result(heard)

    def _timeout(self, msg_id: bytes) -> None:
        """In place of the library's, which fails and forgets nothing if the caller has given up."""
        waiting, _ = self._outstanding.pop(msg_id)
        if not waiting.done():
            waiting.set_result((False, None))

    # ---- calls of others -----------------------------------------------------------------------------------

    def hear_ping(self, sender: Sender, nodeid: bytes) -> bytes:
        self.welcome_if_new(Node(nodeid, *sender))
        return self.source_node.id

    def hear_store(self, sender: Sender, nodeid: bytes, key: bytes, value: bytes) -> bool:
        self.welcome_if_new(Node(nodeid, *sender))
        return self.storage.offer(key, value, sender[0])

    def hear_find_node(self, sender: Sender, nodeid: bytes, key: bytes) -> list[tuple[bytes, str, int]]:
        asking = Node(nodeid, *sender)
        self.welcome_if_new(asking)
        near = self.router.find_neighbors(Node(key), exclude=asking)
        return [(node.id, node.ip, node.port) for node in near if may_tell(sender[0], node.ip)]

    def hear_find_value(self, sender: Sender, nodeid: bytes, key: bytes) -> Any:
        value = self.storage.get(key)
        if value is None:
            return self.hear_find_node(sender, nodeid, key)
        self.welcome_if_new(Node(nodeid, *sender))
        return {"value": value}

    def welcome_if_new(self, node: Node) -> None:
        """Who calls becomes a contact once it has answered a call of ours under the same id. Nothing is sent to it for
        its coming, as the library does: what a node should hold is published again soon."""
        if self.router.is_new_node(node):
            self.check(node)

    def check(self, node: Node) -> None:
        """Ask whether it is there, in its own time; it becomes a contact, or is one no more."""
        if node.id not in self._checks and len(self._checks) < MOST_CHECKS:
            task = asyncio.get_running_loop().create_task(self._check(node))
            self._checks[node.id] = task
            task.add_done_callback(lambda done: self._checks.pop(node.id, None))

    async def _check(self, node: Node) -> None:
        told = await self.identify(home(node))
        if told is not None and told.id == node.id:
            self.router.add_contact(told)
        else:
            self.router.remove_contact(node)

    # ---- calls of ours -------------------------------------------------------------------------------------

    async def identify(self, address: Sender) -> Node | None:
        """The node at an address, or None if none answers; within ANSWER_S."""
        answered, told = await self.ping(address, self.source_node.id)
        return Node(told, *address) if answered and isinstance(told, bytes) else None

    async def ask(self, node: Node, key: bytes) -> tuple[list[Node], bytes | None] | None:
        """The nodes near `key` that `node` knows, and the value that it has; None if it does not answer."""
        address = home(node)
        (answered, near), (_, found) = await asyncio.gather(
            self.find_node(address, self.source_node.id, key),
            self.find_value(address, self.source_node.id, key),
        )
        if not answered:
            self.router.remove_contact(node)
            return None
        if self.router.is_new_node(node):
            self.check(node)  # it may be known under another id than the one that was told
        else:
            self.router.add_contact(node)
        nodes = [
            Node(*each)
            for each in (near if isinstance(near, list) else [])[:NEAREST]
            if each[0] != self.source_node.id and may_tell(address[0], each[1])
        ]
        return nodes, found.get("value") if isinstance(found, dict) else None

    async def give(self, node: Node, key: bytes, value: bytes) -> bool:
        """Whether `node` took the value."""
        answered, taken = await self.store(home(node), self.source_node.id, key, value)
        return answered and taken is True

    def end(self) -> None:
        """Nobody waits any more."""
        for task in list(self._checks.values()):
            task.cancel()
        for waiting, timer in self._outstanding.values():
            timer.cancel()
            waiting.cancel()
        self._outstanding.clear()


def home(node: Node) -> Sender:
    """Where a contact is. Contacts have addresses; Kademlia's `Node` is also used for keys, which have none."""
    return str(node.ip), int(node.port or 0)


def may_tell(teller: str, told: str) -> bool:
    """Whether `teller` may have us send to `told`: a single machine's address and no name (which would be looked up,
    while everything waits), and one on loopback only if the teller is there too."""
    try:
        address, by = ipaddress.ip_address(told), ipaddress.ip_address(teller)
    except ValueError:
        return False
    if address.version == 6 and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return not (address.is_multicast or address.is_unspecified or address.is_reserved) and (
        by.is_loopback or not address.is_loopback
    )


def _plain(address: Any) -> Sender:
    """Host and port; an IPv4 address as such, also where the socket speaks both families."""
    host = str(address[0])
    return host.removeprefix("::ffff:") if host.startswith("::ffff:") and "." in host else host, address[1]


class _Outgoing:
    """A transport whose `sendto` takes plain addresses, whatever the socket's family, and never raises."""

    def __init__(self, transport: asyncio.DatagramTransport) -> None:
        self._transport = transport
        self._mapped = len(transport.get_extra_info("sockname")) == 4

    def sendto(self, data: bytes, address: Sender) -> None:
        host, port = address
        mapped = self._mapped and ":" not in host
        try:
            self._transport.sendto(data, (f"::ffff:{host}" if mapped else host, port))
        except (OSError, ValueError, TypeError):  # no way there; who waits for the answer waits in vain
            return

    def close(self) -> None:
        self._transport.close()
