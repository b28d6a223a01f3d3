"""A rank's part of the shared state: digests of any cuts add up to the digest of the whole."""

from __future__ import annotations

import numpy as np
import pytest

from atoll import kernels
from atoll.diloco.outer import OuterState
from atoll.diloco.schedule import OuterSchedule
from atoll.kernels import Table
from atoll.state.ownership import sharded_ranges

SHAPES = [(5, 1001), (1_100_000,), (7,), ()]
SHAPE = OuterSchedule.constant(2, 0.7, 0.9, True, 10).round_at(0)


def parts(values: np.ndarray, ranges: tuple) -> np.ndarray:
    return np.concatenate([values[each.start : each.stop] for each in ranges] or [values[:0]])


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_tables_of_ranks_add_up_to_those_of_the_whole(num_ranks: int) -> None:
    rng = np.random.default_rng(num_ranks)
    numel = sum(int(np.prod(shape)) for shape in SHAPES)
    whole = rng.standard_normal(numel).astype(np.float32)
    mean = rng.standard_normal(numel).astype(np.float32)
    state = OuterState(whole.copy())
    told: list[list[Table]] = []

    def keep(tables: object) -> list[Table]:
        told.append(list(tables))  # type: ignore[call-overload]
        return told[-1]

    ranks = []
    for rank in range(num_ranks):
        ranges = sharded_ranges(SHAPES, rank, num_ranks)
        ranks.append(OuterState(parts(whole, ranges), ranges, numel=numel, sum_tables=keep))
    for _ in range(2):
        told.clear()
        for each in ranks:
            each.digest()
        with np.errstate(over="ignore"):
            tables = [sum(rows[vector] for rows in told) for vector in range(2)]
        assert kernels.state_digest(tables) == state.digest()
        state.commit(mean, SHAPE)
        for each in ranks:
            each.commit(parts(mean, each.ranges), SHAPE)
            assert np.array_equal(each.anchor, parts(state.anchor, each.ranges))


def test_a_rank_with_nothing_adds_nothing() -> None:
    table = OuterState(np.zeros(0, dtype=np.float32), numel=10, sum_tables=list)
    table.digest()
    assert table.tables is not None
    assert not any(rows.any() for rows in table.tables)
