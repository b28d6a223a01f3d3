"""The contract of every communicator: reduce an encoded vector over the members of a plan, or say why not.

A communicator moves *encoded contributions* to the roots of the plan's lanes, where they are decoded, added in plan
order, divided, and encoded once more; the *finished bytes* go to every member unchanged. Adapters: `native` (the C++
engine over TCP), `loopback` (several members in one process), `faulty` (any of them, following a script of faults).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.plan.grid import Grid
from atoll.values import OpId, Plan, ReduceReport

Bytes = NDArray[np.uint8]


class Communicator(Protocol):
    """One rank's end of the reductions."""

    @property
    def port(self) -> int:
        """The port on which other ranks reach this one (0 where there is no socket)."""
        ...

    def reduce(self, plan: Plan, grid: Grid, contribution: Bytes | None, result: Bytes) -> ReduceReport:
        """Take part in one attempt; blocks until it ends, at most `plan.deadline_s` and a little.

        `grid` has the sizes of the model's parameters, in layout order. The plan's ranks refine it: see `plan.routes`,
        of which this rank's `part` says how its own vector is encoded and what comes back decoded. `contribution` is
        this rank's encoded update (`part.grid.wire_bytes(plan.codec)` bytes; all of the vector, and its own grid, where
        every member has one rank), or None if this peer does not contribute. `result` (same length, writable) receives
        the finished bytes; if the report is not ok its contents are unspecified. Both buffers are free again when the
        call returns. Never raises for the network.
        """
        ...

    def abort(self, op: OpId) -> None:
        """End an attempt from any thread: its `reduce` returns soon, not ok. Unknown ops are remembered as aborted."""
        ...

    def close(self) -> None:
        """Close all sockets and join all threads. Idempotent."""
        ...
