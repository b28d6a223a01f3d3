"""Which bytes a plan moves, to the byte: what every member sends and receives, and what it has to hold meanwhile. Pure.

The engine moves just these (`native/engine/op.h`), as long as nothing breaks: payloads, a header for each, and an
acknowledgement of each.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.plan.chunks import CHUNK_BYTES, chunk_table
from atoll.plan.grid import Grid
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
) -> dict[str, Traffic]:
    """By member, over all lanes. `contributors` None: all members. ValueError if a lane is no tree over the members."""
    table = chunk_table(grid, lanes, codec, chunk_bytes)
    sizes = np.diff(table.offsets)
    lane_bytes = np.bincount(table.lanes, sizes, len(lanes)).astype(np.int64)
    lane_chunks = np.bincount(table.lanes, minlength=len(lanes))
    contributes = contributing(members, contributors)
    nodes = np.arange(len(members))
    sent, received, held = (np.zeros(len(members), dtype=np.int64) for _ in range(3))
    for lane, payload, chunks in zip(lanes, lane_bytes.tolist(), lane_chunks.tolist(), strict=True):
        tree = Tree.of(lane, members)
        senders, below = nodes[sends(tree, contributes)], nodes[nodes != tree.root]
        inputs = contributes.astype(np.int64)
        np.add.at(inputs, tree.up[senders], 1)
        passes_on = (inputs > 1) & (nodes != tree.root)
        np.add.at(held, tree.up[senders], payload)
        held[passes_on] += payload
        sources = np.concatenate([senders, tree.down[below]])
        targets = np.concatenate([tree.up[senders], below])
        framed, acks = payload + FRAME_BYTES * chunks, FRAME_BYTES * chunks
        np.add.at(sent, sources, framed)
        np.add.at(received, targets, framed)
        np.add.at(sent, targets, acks)
        np.add.at(received, sources, acks)
    rows = zip(sent.tolist(), received.tolist(), held.tolist(), strict=True)
    return {member: Traffic(*row) for member, row in zip(members, rows, strict=True)}
