"""Row slices of a peer's ranks: what `torch.chunk` (and so FSDP2) gives each rank, and nothing lost between them."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.state.ownership import rows_of, sharded_ranges
from atoll.values import Range

SHAPES = st.lists(st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple), max_size=6)


@given(rows=st.integers(0, 40), num_ranks=st.integers(1, 9))
def test_slices_are_those_of_torch_chunk(rows: int, num_ranks: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.chunk(torch.arange(rows), num_ranks)] if rows else []
    chunks = [chunk for chunk in chunks if chunk]
    ours = [list(range(*rows_of(rows, rank, num_ranks))) for rank in range(num_ranks)]
    assert ours[: len(chunks)] == chunks
    assert not any(ours[len(chunks) :])


@given(shapes=SHAPES, num_ranks=st.integers(1, 5))
def test_every_element_belongs_to_one_rank(shapes: list[tuple[int, ...]], num_ranks: int) -> None:
    owners: list[int] = []
    for rank in range(num_ranks):
        ranges = sharded_ranges(shapes, rank, num_ranks)
        assert all(a.stop < b.start for a, b in itertools.pairwise(ranges))
        owners += [element for each in ranges for element in range(each.start, each.stop)]
    assert sorted(owners) == list(range(sum(math.prod(shape) for shape in shapes)))


def test_a_matrix_a_number_and_a_vector_on_two_ranks() -> None:
    shapes = [(3, 3), (), (4,)]
    assert sharded_ranges(shapes, 0, 2) == (Range(0, 6), Range(9, 12))
    assert sharded_ranges(shapes, 1, 2) == (Range(6, 9), Range(12, 14))
