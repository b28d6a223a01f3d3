"""Several members in one process: same contract, same formula, no sockets. For tests and examples.

Every rank is a thread with a `LoopbackCommunicator` of the same `LoopbackHub`. An attempt succeeds once all ranks
of the plan's members take part; the last to come computes the mean for all.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np

from atoll.comm.base import Bytes
from atoll.comm.trees import reduce_here
from atoll.plan.grid import Grid
from atoll.plan.routes import Part, routing_of
from atoll.values import Edge, NodeId, OpId, Plan, ReduceReport


@dataclass
class _Meeting:
    """One op: who is there, with what, and how it ended."""

    plan: Plan
    grid: Grid
    present: set[NodeId] = field(default_factory=set)
    contributions: dict[NodeId, Bytes] = field(default_factory=dict)
    outcome: ReduceReport | None = None
    finished: Bytes | None = None


class LoopbackHub:
    """Where the members of one process meet. Its one lock guards everything here, the mean included."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._meetings: dict[OpId, _Meeting] = {}
        self._over: set[tuple[NodeId, OpId]] = set()

    def abort(self, node: NodeId, op: OpId) -> None:
        with self._changed:
            self._over.add((node, op))
            self._changed.notify_all()

    def reduce(
        self, node: NodeId, plan: Plan, grid: Grid, contribution: Bytes | None, result: Bytes
    ) -> ReduceReport:
        deadline = time.monotonic() + plan.deadline_s
        try:
            part = routing_of(plan, grid).part(node.peer, node.rank)
        except ValueError as error:
            return ReduceReport(ok=False, reason=f"op {plan.op}: {error}")
        with self._changed:
            if (node, plan.op) in self._over:
                return ReduceReport(ok=False, reason=f"op {plan.op} was used or aborted before")
            meeting = self._meetings.setdefault(plan.op, _Meeting(plan, grid))
            try:
                return self._meet(meeting, node, plan, grid, part, contribution, result, deadline)
            finally:
                meeting.present.discard(node)
                self._over.add((node, plan.op))
                if not meeting.present:
                    self._meetings.pop(plan.op, None)

    def _meet(
        self,
        meeting: _Meeting,
        node: NodeId,
        plan: Plan,
        grid: Grid,
        part: Part,
        contribution: Bytes | None,
        result: Bytes,
        deadline: float,
    ) -> ReduceReport:
        if (plan, grid) != (meeting.plan, meeting.grid):
            meeting.outcome = ReduceReport(
                ok=False, reason=f"{node.peer} holds another plan for op {plan.op}"
            )
        meeting.present.add(node)
        if contribution is not None:
            meeting.contributions[node] = contribution
        if meeting.outcome is None and meeting.present == _nodes(plan):
            self._finish(meeting)
        self._changed.notify_all()
        self._changed.wait_for(
            lambda: meeting.outcome is not None or (node, plan.op) in self._over,
            timeout=max(0.0, deadline - time.monotonic()),
        )
        if (node, plan.op) in self._over:
            return ReduceReport(ok=False, reason="aborted")
        if meeting.outcome is None:
            return _late(meeting, node.peer)
        if meeting.finished is not None:
            np.concatenate([meeting.finished[each] for each in _places(plan, grid, part)], out=result)
        return meeting.outcome

    def _finish(self, meeting: _Meeting) -> None:
        plan, grid = meeting.plan, meeting.grid
        given = {each.peer: _assembled(meeting, each.peer) for each in plan.contributions}
        meeting.finished = reduce_here(plan, grid, given)
        if meeting.finished is not None:
            meeting.outcome = ReduceReport(ok=True, reason="all contributions were summed")
        else:
            meeting.outcome = ReduceReport(
                ok=False, reason="the mean is not finite: a contribution is damaged"
            )


class LoopbackCommunicator:
    """One rank's end of a hub."""

    def __init__(self, hub: LoopbackHub, peer: str, rank: int = 0) -> None:
        self._hub, self._node = hub, NodeId(peer, rank)

    @property
    def port(self) -> int:
        return 0

    def reduce(self, plan: Plan, grid: Grid, contribution: Bytes | None, result: Bytes) -> ReduceReport:
        """See `Communicator.reduce`."""
        return self._hub.reduce(self._node, plan, grid, contribution, result)

    def abort(self, op: OpId) -> None:
        self._hub.abort(self._node, op)

    def close(self) -> None:
        """Nothing to close: the hub holds no threads or sockets."""


def _nodes(plan: Plan) -> set[NodeId]:
    return {NodeId(peer, rank) for peer in plan.members for rank in range(len(plan.ranks[peer]))}


def _places(plan: Plan, grid: Grid, part: Part) -> list[slice]:
    """Where a rank's wire bytes lie in the op's."""
    return routing_of(plan, grid).wire_slices(plan.codec, part) or [slice(0, 0)]


def _assembled(meeting: _Meeting, peer: str) -> Bytes:
    """A contributor's whole update, from those of its ranks."""
    plan, grid = meeting.plan, meeting.grid
    routing = routing_of(plan, grid)
    update = np.empty(routing.grid.wire_bytes(plan.codec), dtype=np.uint8)
    for rank in range(len(plan.ranks[peer])):
        at = 0
        for place in _places(plan, grid, routing.part(peer, rank)):
            size = place.stop - place.start
            update[place] = meeting.contributions[NodeId(peer, rank)][at : at + size]
            at += size
    return update


def _late(meeting: _Meeting, peer: str) -> ReduceReport:
    missing = sorted({node.peer for node in _nodes(meeting.plan) - meeting.present})
    broken = tuple(edge for other in missing for edge in (Edge(other, peer), Edge(peer, other)))
    reason = f"the deadline of {meeting.plan.deadline_s:g} s passed; still missing: {', '.join(missing)}"
    return ReduceReport(ok=False, reason=reason, broken=broken)
