"""Peers of several ranks in one process: how they are cut, their engines, and plans for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from atoll.comm.base import Bytes, Communicator
from atoll.comm.native import NativeCommunicator
from atoll.plan.grid import Grid
from atoll.plan.routes import Routing, routing_of
from atoll.state.ownership import sharded_ranges
from atoll.values import Contribution, Lane, NodeId, OpId, Plan, Range, RankInfo, ReduceReport
from support.engines import Running, open_engine

Cut = tuple[tuple[Range, ...], ...]

SHAPES = ((67, 40), (40,), (5, 3, 90), (), (1, 700), (129, 8))
"""Rows that neither two nor three ranks share evenly, one row, and no row."""
GRID = Grid.of([math.prod(shape) for shape in SHAPES])


def cut_of(num_ranks: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> Cut:
    """As FSDP2 shards rows."""
    return tuple(sharded_ranges(shapes, rank, num_ranks) for rank in range(num_ranks))


def plan_with(
    cuts: Mapping[str, Cut], ports: Mapping[NodeId, int], codec: str, op: OpId, **changes: Any
) -> Plan:
    """Everybody contributes with weight 1 and roots a star, unless `changes` say otherwise."""
    members = tuple(sorted(cuts))
    given = {
        "op": op,
        "base_version": 0,
        "members": members,
        "contributions": tuple(Contribution(peer, 1) for peer in members),
        "ranks": {
            peer: tuple(
                RankInfo("127.0.0.1", ports.get(NodeId(peer, rank), 0), own)
                for rank, own in enumerate(cuts[peer])
            )
            for peer in members
        },
        "lanes": tuple(Lane(peer) for peer in members),
        "codec": codec,
        "deadline_s": 20.0,
    }
    return Plan(**(given | changes))


def own_vector(cut: Cut, rank: int, values: np.ndarray) -> np.ndarray:
    """What a rank holds of the model's vector."""
    return np.concatenate([values[each.start : each.stop] for each in cut[rank]] or [values[:0]])


def begin(
    comms: Mapping[NodeId, Communicator],
    plan: Plan,
    grid: Grid,
    values: Mapping[str, np.ndarray],
    before: Mapping[NodeId, Running] | None = None,
) -> dict[NodeId, Running]:
    """All ranks at once; `values` are whole vectors of the contributors. Results lie where those of the attempt
    `before` do."""
    routing, running = routing_of(plan, grid), {}
    contributors = {each.peer for each in plan.contributions}
    for node, comm in comms.items():
        part = routing.part(node.peer, node.rank)
        wire_bytes = part.grid.wire_bytes(plan.codec)
        contribution = None
        if node.peer in contributors:
            contribution = np.empty(wire_bytes, np.uint8)
            cut = tuple(info.ranges for info in plan.ranks[node.peer])
            assert part.runs.encode(plan.codec, own_vector(cut, node.rank, values[node.peer]), contribution)
        result = before[node].result if before and node in before else np.full(wire_bytes, 0xAA, np.uint8)
        running[node] = Running(comm, plan, grid, contribution, result)
    return running


def reduce_all(
    comms: Mapping[NodeId, Communicator], plan: Plan, grid: Grid, values: Mapping[str, np.ndarray]
) -> dict[NodeId, Bytes]:
    """Every rank's finished bytes; all must have succeeded."""
    running = begin(comms, plan, grid, values)
    reports: list[ReduceReport] = [one.report() for one in running.values()]
    assert all(report.ok for report in reports), [report.reason for report in reports]
    return {node: one.result for node, one in running.items()}


def assembled(routing: Routing, codec: str, peer: str, results: Mapping[NodeId, Bytes]) -> Bytes:
    """A peer's finished bytes in the order of the op, from those of its ranks."""
    whole = np.empty(routing.grid.wire_bytes(codec), np.uint8)
    for rank in range(routing.num_ranks[routing.members.index(peer)]):
        at, data = 0, results[NodeId(peer, rank)]
        for place in routing.wire_slices(codec, routing.part(peer, rank)):
            whole[place] = data[at : at + place.stop - place.start]
            at += place.stop - place.start
        assert at == data.size
    return whole


class RankEngines:
    """An engine for each rank of each peer."""

    def __init__(self, cuts: Mapping[str, Cut], **options: Any) -> None:
        self.cuts = dict(cuts)
        self.comms: dict[NodeId, NativeCommunicator] = {
            NodeId(peer, rank): open_engine(peer, rank=rank, **options)
            for peer, cut in cuts.items()
            for rank in range(len(cut))
        }

    def __enter__(self) -> RankEngines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for comm in self.comms.values():
            comm.close()

    def plan(self, codec: str, op: OpId, **changes: Any) -> Plan:
        return plan_with(
            self.cuts, {node: comm.port for node, comm in self.comms.items()}, codec, op, **changes
        )
