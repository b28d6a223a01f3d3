"""A plan's reduction in one process: the same trees, the same formula, the same bits as the engine's nodes together."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from atoll import kernels
from atoll.comm.base import Bytes
from atoll.plan.chunks import chunk_table
from atoll.plan.grid import Grid
from atoll.plan.routes import routing_of
from atoll.plan.trees import WayUp, way_up
from atoll.values import Plan


def reduce_here(plan: Plan, grid: Grid, contributions: Mapping[str, Bytes]) -> Bytes | None:
    """The finished bytes of `plan`, from each contributor's encoded update; None if a mean is not finite.

    `grid` is the parameters'; all bytes are of whole vectors, in the order of the op (`plan.routes`). ValueError if the
    plan makes no sense.
    """
    routing = routing_of(plan, grid)
    grid = routing.grid
    finished = np.empty(grid.wire_bytes(plan.codec), dtype=np.uint8)
    chunks = chunk_table(grid, plan.lanes, plan.codec, plan.chunk_bytes, routing.cuts)
    ways = [way_up(lane, plan.members, plan.contributions) for lane in plan.lanes]
    for chunk in range(len(chunks)):
        start, stop = int(chunks.starts[chunk]), int(chunks.starts[chunk + 1])
        part = slice(int(chunks.offsets[chunk]), int(chunks.offsets[chunk + 1]))
        encoded = {
            plan.members.index(contribution.peer): contributions[contribution.peer][part]
            for contribution in plan.contributions
        }
        mean = _climb(ways[int(chunks.lanes[chunk])], plan.codec, grid.part(start, stop), encoded)
        if mean is None:
            return None
        finished[part] = mean
    return finished


def _climb(way: WayUp, codec: str, grid: Grid, encoded: Mapping[int, Bytes]) -> Bytes | None:
    """One chunk from the leaves to the root."""
    means: dict[int, Bytes] = {}
    for member in way.order:
        inputs = way.inputs[member]
        parts = [encoded[each.member] if each.member == member else means[each.member] for each in inputs]
        if len(inputs) == 1 and member != way.root:
            means[member] = parts[0]
            continue
        mean = np.empty(grid.wire_bytes(codec), dtype=np.uint8)
        if not kernels.weighted_mean(codec, grid.boundaries, parts, [each.weight for each in inputs], mean):
            return None
        means[member] = mean
    return means[way.root]
