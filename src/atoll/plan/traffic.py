"""Which bytes a plan moves, to the byte: what every member sends and receives, and what it has to hold meanwhile. Pure.

The engine moves just these (`native/engine/op.h`), as long as nothing breaks: payloads, a header for each, and an
acknowledgement of each. Not counted is the frame by which an op begins on each connection.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.plan.chunks import CHUNK_BYTES, chunk_table
from atoll.plan.grid import Grid, Int64s
from atoll.plan.price import contributing
from atoll.plan.shapes import Tree, sends
from atoll.values import Lane

FRAME_BYTES = 64
"""The header of a frame; an acknowledgement is nothing else."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one member in one attempt. `held_bytes` is the memory for what others send it to add up, and for the sums
    that it passes on: not its own update, and not the result."""

    sent_bytes: int = 0
    received_bytes: int = 0
    held_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.held_bytes + other.held_bytes,
        )


def traffic(
    lanes: Sequence[Lane],
    members: Sequence[str],
    grid: Grid,
    codec: str,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    contributors: Collection[str] | None = None,
    routes: Sequence[int] | Int64s = (),
) -> dict[str, Traffic]:
    """By member, over all lanes and routes (`Routing.cuts`; none: one route), all its ranks together. `contributors`
    None: all members. ValueError if a lane is no tree over the members."""
    by_route = traffic_by_route(
        lanes, members, grid, codec, chunk_bytes=chunk_bytes, contributors=contributors, routes=routes
    )
    return {member: sum((each[member] for each in by_route), Traffic()) for member in members}


def traffic_by_route(
    lanes: Sequence[Lane],
    members: Sequence[str],
    grid: Grid,
    codec: str,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    contributors: Collection[str] | None = None,
    routes: Sequence[int] | Int64s = (),
) -> list[dict[str, Traffic]]:
    """As `traffic`, of each route: one rank of every member moves it."""
    table = chunk_table(grid, lanes, codec, chunk_bytes, routes)
    num_routes = max(1, len(routes) - 1)
    cells = table.routes * len(lanes) + table.lanes
    shape = num_routes, len(lanes)
    payloads = (
        np.bincount(cells, np.diff(table.offsets), num_routes * len(lanes)).astype(np.int64).reshape(shape)
    )
    acks = FRAME_BYTES * np.bincount(cells, minlength=num_routes * len(lanes)).reshape(shape)
    contributes = contributing(members, contributors)
    nodes = np.arange(len(members))
    sent, received, held = (np.zeros((num_routes, len(members)), dtype=np.int64) for _ in range(3))
    for index, lane in enumerate(lanes):
        tree = Tree.of(lane, members)
        senders, below = nodes[sends(tree, contributes)], nodes[nodes != tree.root]
        taken = np.bincount(tree.up[senders], minlength=len(members))
        passes_on = (contributes + taken > 1) & (nodes != tree.root)
        sources = np.bincount(np.concatenate([senders, tree.down[below]]), minlength=len(members))
        targets = np.bincount(np.concatenate([tree.up[senders], below]), minlength=len(members))
        payload, acked = payloads[:, index], acks[:, index]
        held += np.outer(payload, taken + passes_on)
        sent += np.outer(payload + acked, sources) + np.outer(acked, targets)
        received += np.outer(payload + acked, targets) + np.outer(acked, sources)
    return [
        {member: Traffic(*row) for member, row in zip(members, zip(*rows, strict=True), strict=True)}
        for rows in zip(sent.tolist(), received.tolist(), held.tolist(), strict=True)
    ]
