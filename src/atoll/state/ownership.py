"""Which elements of the long vector each rank of a peer owns, where its model is sharded by rows as FSDP2 does it.

`fully_shard` cuts every parameter along its first dimension into as many slices as there are ranks, all of the same
number of rows but the last ones, which may be shorter or empty (`torch.chunk`). A row is whole on one rank. What is not
cut, a 0-dim parameter or a model on one rank, belongs to the first rank alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from atoll.values import Range


def rows_of(num_rows: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """First row and the row after the last of rank `rank`'s slice; equal if it has none."""
    most = -(-num_rows // num_ranks)
    return min(rank * most, num_rows), min((rank + 1) * most, num_rows)


def sharded_ranges(shapes: Sequence[tuple[int, ...]], rank: int, num_ranks: int) -> tuple[Range, ...]:
    """The ranges of rank `rank` (global coordinates, ascending, no two adjacent) for parameters of these shapes, in the
    layout's order."""
    ranges: list[Range] = []
    start = 0
    for shape in shapes:
        numel = math.prod(shape)
        if shape and numel:
            row = numel // shape[0]
            first, stop = rows_of(shape[0], rank, num_ranks)
            own = Range(start + first * row, start + stop * row)
        else:
            own = Range(start, start + (numel if rank == 0 else 0))
        if own.start < own.stop:
            if ranges and ranges[-1].stop == own.start:
                own = Range(ranges.pop().start, own.stop)
            ranges.append(own)
        start += numel
    return tuple(ranges)
