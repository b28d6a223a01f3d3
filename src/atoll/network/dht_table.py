"""The nodes that a node of the DHT knows: Kademlia's routing table, with an end to its growth.

This module needs the extra [dht].
"""

from __future__ import annotations

from typing import Protocol

from kademlia.node import Node
from kademlia.routing import RoutingTable

NEAREST = 8
"""Contacts in a bucket, and nodes that a value is stored at (Kademlia's k)."""
MOST_BUCKETS = 32
"""So at most 32 x (8 contacts + 40 in reserve), and enough for 2^32 nodes."""


class _Checker(Protocol):
    def check(self, node: Node) -> None: ...


class BoundedTable(RoutingTable):
    """The library splits buckets for as long as ids that were chosen for it make it; and gives a contact's place to
    whoever claims its id. Here only the bucket of this node's own id splits, and a place is given up by silence."""

    def __init__(self, checker: _Checker, own: Node) -> None:
        super().__init__(checker, NEAREST, own)
        self._checker = checker

    def __len__(self) -> int:
        return sum(len(bucket) + len(bucket.replacement_nodes) for bucket in self.buckets)

    def add_contact(self, node: Node) -> None:
        """A node that has just answered. One for which there is no place waits in reserve, and the oldest of its bucket
        is asked whether it is still there."""
        if node.id == self.node.id:
            return
        while True:
            index = self.get_bucket_for(node)
            assert index is not None, "ids of 160 bits all have their bucket"
            bucket = self.buckets[index]
            known = bucket[node.id]
            if (known is not None and not known.same_home_as(node)) or bucket.add_node(node):
                return
            if index != self.get_bucket_for(self.node) or len(self.buckets) >= MOST_BUCKETS:
                self._checker.check(bucket.head())
                return
            self.split_bucket(index)
