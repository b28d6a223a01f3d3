"""The state that all members share to the bit: anchor, outer momentum, version, round, and the run's step.

A rank holds its own ranges of the two vectors; with one rank that is all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from atoll import kernels
from atoll.diloco.schedule import RoundShape
from atoll.kernels import Table
from atoll.values import Range

Floats = NDArray[np.float32]
SumTables = Callable[[Sequence[Table]], list[Table]]


class OuterState:
    """The shared part of the state, on the CPU; changed only below a round's commit line, on the training thread."""

    def __init__(
        self,
        anchor: Floats,
        ranges: tuple[Range, ...] = (),
        *,
        numel: int = 0,
        sum_tables: SumTables = list,
    ) -> None:
        """Takes `anchor` (fp32, one dimension) as its own: the elements of `ranges` (global coordinates, ascending), of
        `numel` in all; without them the whole vector. `sum_tables` adds up the digest tables of a peer's ranks; then
        `digest` is for all ranks together. `round` counts the rounds that have a verdict: the one under way is
        `round + 1`."""
        self.anchor = anchor
        self.velocity = np.zeros_like(anchor)
        self.ranges = ranges or (Range(0, anchor.size),)
        self.numel = numel or anchor.size
        self.version = 0
        self.round = 0
        self.step = 0
        self._sum_tables = sum_tables
        self._tables: tuple[int, list[Table]] = (-1, [])

    def commit(self, mean: Floats, shape: RoundShape) -> None:
        """Take the outer step on the mean pseudo-gradient: Nesterov as torch.optim.SGD defines it, in our own kernel
        (algorithms: outer Nesterov, exact form), so that every processor gives the same bits."""
        kernels.outer_step(
            self.anchor, self.velocity, mean, lr=shape.lr, momentum=shape.momentum, nesterov=shape.nesterov
        )
        self.version += 1
        self._pass_round(shape)

    def skip(self, shape: RoundShape) -> None:
        """A round without a commit: the anchor stays, the run's step goes on."""
        self._pass_round(shape)

    def digest(self) -> str:
        """SHA-256 over the digest tables of anchor and momentum: equal on all members that hold this version."""
        tables = self._sum_tables([self._table(values) for values in (self.anchor, self.velocity)])
        self._tables = (self.version, tables)
        return kernels.state_digest(tables)

    @property
    def tables(self) -> list[Table] | None:
        """The digest tables of this version, anchor first, as they were last computed; None if they were not."""
        version, tables = self._tables
        return tables if version == self.version else None

    def _table(self, values: Floats) -> Table:
        """The table of the whole vector, with what this rank's ranges have in it."""
        if len(self.ranges) == 1 and self.ranges[0] == Range(0, self.numel):
            return kernels.digest_pieces(values, 0, kernels.PIECE)
        table = np.zeros((-(-self.numel // kernels.PIECE), 2), dtype=np.uint64)
        at = 0
        for each in self.ranges:
            size = each.stop - each.start
            rows = kernels.digest_pieces(values[at : at + size], each.start, kernels.PIECE)
            first = each.start // kernels.PIECE
            table[first : first + len(rows)] += rows
            at += size
        return table

    def _pass_round(self, shape: RoundShape) -> None:
        self.round += 1
        self.step += shape.inner_steps
