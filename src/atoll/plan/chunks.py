"""From a plan's lanes to a table of chunks: which elements each root sums, cut to about 1 MiB on the wire.

Pure: every member expands the same plan to the same table. Chunks are whole blocks of one route, and lanes share every
route alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from atoll.plan.grid import Grid, Int64s
from atoll.values import Lane

CHUNK_BYTES = 1 << 20
LEAST_PART = 64
"""Every chunk costs two headers of 64 bytes and a turn of the event loop: 16 KiB are still worth them."""


@dataclass(frozen=True)
class ChunkTable:
    """Chunk `c` covers elements `[starts[c], starts[c+1])`, bytes `[offsets[c], offsets[c+1])`, on lane `lanes[c]` of
    route `routes[c]`."""

    starts: Int64s
    offsets: Int64s
    lanes: Int64s
    routes: Int64s

    def __len__(self) -> int:
        return len(self.lanes)


def chunk_table(
    grid: Grid,
    lanes: Sequence[Lane],
    codec: str,
    chunk_bytes: int = CHUNK_BYTES,
    routes: Sequence[int] | Int64s = (),
) -> ChunkTable:
    """Cut every route among `lanes` in proportion to their shares, then into chunks of at most `chunk_bytes` or one
    block. Routes begin at element positions `routes`, the last of which is the end (`Routing.cuts`); none: one route.

    A lane whose share rounds to no block gets no chunk. Of several routes some may be short: lanes share these in
    whole `LEAST_PART`ths of a chunk, and the last gets what is left.
    """
    num_blocks = grid.num_blocks(codec)
    wire_bytes = grid.wire_bytes(codec)
    total = sum(lane.share for lane in lanes)
    blocks_per_chunk = max(1, num_blocks * chunk_bytes // max(wire_bytes, 1))
    ends = [0, num_blocks]
    if len(routes) > 2:
        ends = grid.blocks_before(codec, np.asarray(routes, dtype=np.int64)).tolist()
    grain = max(1, blocks_per_chunk // LEAST_PART) if len(ends) > 2 else 1
    cuts, owners, done = [0], [], 0
    for route, (first, last) in enumerate(pairwise(ends)):
        given = 0
        for index, lane in enumerate(lanes):
            given += lane.share
            end = last if given == total else first + (last - first) * given // (total * grain) * grain
            while done < end:
                done = min(done + blocks_per_chunk, end)
                cuts.append(done)
                owners.append((index, route))
    starts = grid.block_starts(codec, np.asarray(cuts, dtype=np.int64))
    of_lane, of_route = np.asarray(owners, dtype=np.int64).reshape(-1, 2).T.copy()
    return ChunkTable(starts, grid.byte_offsets(codec, starts), of_lane, of_route)
