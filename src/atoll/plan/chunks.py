"""From a plan's lanes to a table of chunks: which elements each root sums, cut to about 1 MiB on the wire.

Pure: every member expands the same plan to the same table. Chunks are whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.plan.grid import Grid, Int64s
from atoll.values import Lane

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class ChunkTable:
    """Chunk `c` covers elements `[starts[c], starts[c+1])`, bytes `[offsets[c], offsets[c+1])`, on lane `lanes[c]`."""

    starts: Int64s
    offsets: Int64s
    lanes: Int64s

    def __len__(self) -> int:
        return len(self.lanes)


def chunk_table(grid: Grid, lanes: Sequence[Lane], codec: str, chunk_bytes: int = CHUNK_BYTES) -> ChunkTable:
    """Cut the grid among `lanes` in proportion to their shares, then into chunks of at most `chunk_bytes` or one block.

    A lane whose share rounds to no block gets no chunk.
    """
    num_blocks = grid.num_blocks(codec)
    wire_bytes = grid.wire_bytes(codec)
    total = sum(lane.share for lane in lanes)
    blocks_per_chunk = max(1, num_blocks * chunk_bytes // max(wire_bytes, 1))
    cuts, owners, done, given = [0], [], 0, 0
    for index, lane in enumerate(lanes):
        given += lane.share
        end = num_blocks * given // total
        while done < end:
            done = min(done + blocks_per_chunk, end)
            cuts.append(done)
            owners.append(index)
    starts = grid.block_starts(codec, np.asarray(cuts, dtype=np.int64))
    return ChunkTable(starts, grid.byte_offsets(codec, starts), np.asarray(owners, dtype=np.int64))
