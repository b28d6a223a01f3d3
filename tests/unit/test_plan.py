"""Grid and chunks: pure integers, checked against slow and obvious versions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from atoll.plan.chunks import chunk_table
from atoll.plan.grid import Grid
from atoll.values import CODECS, Lane

sizes = st.lists(st.integers(0, 1200), min_size=1, max_size=8)
codecs = st.sampled_from(sorted(CODECS))


def slow_blocks(grid: Grid, block: int) -> list[tuple[int, int]]:
    """(start, numel) of every block, one by one."""
    blocks, start = [], 0
    for segment in grid.segments:
        for offset in range(0, segment, block):
            blocks.append((start + offset, min(block, segment - offset)))
        start += segment
    return blocks


@given(sizes, codecs)
def test_grid_agrees_with_a_walk_over_blocks(segment_sizes: list[int], codec: str) -> None:
    grid, spec = Grid.of(segment_sizes), CODECS[codec]
    blocks = slow_blocks(grid, spec.block)
    assert grid.num_blocks(codec) == len(blocks)
    assert grid.wire_bytes(codec) == sum(spec.block_bytes(n) for _, n in blocks)
    indices = np.arange(len(blocks) + 1)
    starts = grid.block_starts(codec, indices)
    assert starts.tolist() == [s for s, _ in blocks] + [grid.numel]
    expected = np.concatenate([[0], np.cumsum([spec.block_bytes(n) for _, n in blocks])]).astype(int)
    assert grid.byte_offsets(codec, starts).tolist() == expected.tolist()


@given(sizes, codecs, st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 3000))
def test_chunks_cover_the_grid_once_in_whole_blocks(
    segment_sizes: list[int], codec: str, shares: list[int], chunk_bytes: int
) -> None:
    grid = Grid.of(segment_sizes)
    lanes = [Lane(root=f"p{i}", share=share) for i, share in enumerate(shares)]
    table = chunk_table(grid, lanes, codec, chunk_bytes)
    assert table.starts[0] == 0
    assert table.starts[-1] == grid.numel
    assert (np.diff(table.starts) > 0).all()
    assert len(table.starts) == len(table) + 1 == len(table.offsets)
    assert (np.diff(table.lanes) >= 0).all()
    block_starts = {s for s, _ in slow_blocks(grid, CODECS[codec].block)} | {grid.numel}
    assert set(table.starts.tolist()) <= block_starts
    assert table.offsets[-1] == grid.wire_bytes(codec)


@given(st.integers(1, 5_000_000), st.integers(1, 8))
def test_equal_shares_differ_by_at_most_one_block(numel: int, num_lanes: int) -> None:
    grid = Grid.of([numel])
    table = chunk_table(grid, [Lane(root=str(i)) for i in range(num_lanes)], "int8")
    blocks = np.zeros(num_lanes, dtype=int)
    np.add.at(blocks, table.lanes, -(-np.diff(table.starts) // 256))
    assert blocks.max() - blocks.min() <= 1
