"""Wraps any communicator and follows a script of faults, so that a test can say which attempt fails and how.

A test first asserts `faulty.fired`: a fault that never happened proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from atoll.comm.base import Bytes, Communicator
from atoll.plan.grid import Grid
from atoll.values import Edge, OpId, Plan, ReduceReport


@dataclass(frozen=True, slots=True)
class FlipBit:
    """One bit of the contribution is wrong, as after a memory error; bit 0 is the lowest of byte 0."""

    bit: int


@dataclass(frozen=True, slots=True)
class FailAttempt:
    """This peer takes no part in the attempt and reports these links as broken."""

    broken: tuple[Edge, ...] = ()
    reason: str = "a fault was asked for"


Fault = FlipBit | FailAttempt


class Faulty:
    """A communicator with faults by op; `fired` lists those that happened, in order."""

    def __init__(self, inner: Communicator, script: Mapping[OpId, Fault]) -> None:
        self._inner, self._script = inner, script
        self.fired: list[OpId] = []

    @property
    def port(self) -> int:
        return self._inner.port

    def reduce(self, plan: Plan, grid: Grid, contribution: Bytes | None, result: Bytes) -> ReduceReport:
        match self._script.get(plan.op):
            case FailAttempt(broken=broken, reason=reason):
                self.fired.append(plan.op)
                self._inner.abort(plan.op)
                return ReduceReport(ok=False, reason=reason, broken=broken)
            case FlipBit(bit=bit) if contribution is not None:
                self.fired.append(plan.op)
                contribution = contribution.copy()
                contribution[bit // 8] ^= 1 << (bit % 8)
        return self._inner.reduce(plan, grid, contribution, result)

    def abort(self, op: OpId) -> None:
        self._inner.abort(op)

    def close(self) -> None:
        self._inner.close()
