"""Several members in one process: same contract, same formula, no sockets. For tests and examples.

Every member is a thread with a `LoopbackCommunicator` of the same `LoopbackHub`. An attempt succeeds once all
of the plan's members take part; the last to come computes the mean for all.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from atoll.comm.base import Bytes
from atoll.comm.trees import reduce_here
from atoll.plan.grid import Grid
from atoll.values import Edge, OpId, Plan, ReduceReport


@dataclass
class _Meeting:
    """One op: who is there, with what, and how it ended."""

    plan: Plan
    grid: Grid
    present: set[str] = field(default_factory=set)
    contributions: dict[str, Bytes] = field(default_factory=dict)
    outcome: ReduceReport | None = None
    finished: Bytes | None = None


class LoopbackHub:
    """Where the members of one process meet. Its one lock guards everything here, the mean included."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._meetings: dict[OpId, _Meeting] = {}
        self._over: set[tuple[str, OpId]] = set()

    def abort(self, peer: str, op: OpId) -> None:
        with self._changed:
            self._over.add((peer, op))
            self._changed.notify_all()

    def reduce(
        self, peer: str, plan: Plan, grid: Grid, contribution: Bytes | None, result: Bytes
    ) -> ReduceReport:
        deadline = time.monotonic() + plan.deadline_s
        with self._changed:
            if (peer, plan.op) in self._over:
                return ReduceReport(ok=False, reason=f"op {plan.op} was used or aborted before")
            meeting = self._meetings.setdefault(plan.op, _Meeting(plan, grid))
            try:
                return self._meet(meeting, peer, plan, grid, contribution, result, deadline)
            finally:
                meeting.present.discard(peer)
                self._over.add((peer, plan.op))
                if not meeting.present:
                    self._meetings.pop(plan.op, None)

    def _meet(
        self,
        meeting: _Meeting,
        peer: str,
        plan: Plan,
        grid: Grid,
        contribution: Bytes | None,
        result: Bytes,
        deadline: float,
    ) -> ReduceReport:
        if (plan, grid) != (meeting.plan, meeting.grid):
            meeting.outcome = ReduceReport(ok=False, reason=f"{peer} holds another plan for op {plan.op}")
        meeting.present.add(peer)
        if contribution is not None:
            meeting.contributions[peer] = contribution
        if meeting.outcome is None and meeting.present == set(plan.members):
            self._finish(meeting)
        self._changed.notify_all()
        self._changed.wait_for(
            lambda: meeting.outcome is not None or (peer, plan.op) in self._over,
            timeout=max(0.0, deadline - time.monotonic()),
        )
        if (peer, plan.op) in self._over:
            return ReduceReport(ok=False, reason="aborted")
        if meeting.outcome is None:
            return _late(meeting, peer)
        if meeting.finished is not None:
            result[:] = meeting.finished
        return meeting.outcome

    def _finish(self, meeting: _Meeting) -> None:
        meeting.finished = reduce_here(meeting.plan, meeting.grid, meeting.contributions)
        if meeting.finished is not None:
            meeting.outcome = ReduceReport(ok=True, reason="all contributions were summed")
        else:
            meeting.outcome = ReduceReport(
                ok=False, reason="the mean is not finite: a contribution is damaged"
            )


class LoopbackCommunicator:
    """One member's end of a hub."""

    def __init__(self, hub: LoopbackHub, peer: str) -> None:
        self._hub, self._peer = hub, peer

    @property
    def port(self) -> int:
        return 0

    def reduce(self, plan: Plan, grid: Grid, contribution: Bytes | None, result: Bytes) -> ReduceReport:
        """See `Communicator.reduce`."""
        return self._hub.reduce(self._peer, plan, grid, contribution, result)

    def abort(self, op: OpId) -> None:
        self._hub.abort(self._peer, op)

    def close(self) -> None:
        """Nothing to close: the hub holds no threads or sockets."""


def _late(meeting: _Meeting, peer: str) -> ReduceReport:
    missing = sorted(set(meeting.plan.members) - meeting.present)
    broken = tuple(edge for other in missing for edge in (Edge(other, peer), Edge(peer, other)))
    reason = f"the deadline of {meeting.plan.deadline_s:g} s passed; still missing: {', '.join(missing)}"
    return ReduceReport(ok=False, reason=reason, broken=broken)
