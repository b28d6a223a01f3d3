"""The block grid: where codec blocks begin. Pure integers, the same on every member.

Blocks of `codec.block` elements restart at every *segment*: at each parameter and at each shard boundary of any
member, never at shares or chunks. A rank's grid covers the elements it owns, in its own local coordinates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from atoll.values import CODECS, CodecSpec

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class Grid:
    """Segment sizes in elements, in order; empty segments are dropped."""

    segments: tuple[int, ...]

    @staticmethod
    def of(sizes: Sequence[int]) -> Grid:
        return Grid(tuple(size for size in sizes if size > 0))

    @cached_property
    def numel(self) -> int:
        return sum(self.segments)

    @cached_property
    def boundaries(self) -> Int64s:
        """`len(segments) + 1` element positions, from 0 to `numel`."""
        return np.concatenate([[0], np.cumsum(np.asarray(self.segments, dtype=np.int64))]).astype(np.int64)

    def part(self, start: int, stop: int) -> Grid:
        """The grid of elements `[start, stop)`, both of which begin a block."""
        cuts = np.clip(self.boundaries, start, stop)
        return Grid.of([int(size) for size in np.diff(cuts)])

    def num_blocks(self, codec: str) -> int:
        return int(self._blocks_before(CODECS[codec])[-1])

    def blocks_before(self, codec: str, segment_starts: Int64s) -> Int64s:
        """How many blocks come before element positions at which segments begin, or the vector ends."""
        return self._blocks_before(CODECS[codec])[np.searchsorted(self.boundaries, segment_starts)]

    def wire_bytes(self, codec: str) -> int:
        """Bytes of one encoded vector."""
        spec = CODECS[codec]
        return sum(spec.run_bytes(size) for size in self.segments)

    def block_starts(self, codec: str, blocks: Int64s) -> Int64s:
        """Element positions at which the given blocks begin (block `num_blocks` begins at `numel`)."""
        spec = CODECS[codec]
        before = self._blocks_before(spec)
        segment = np.clip(np.searchsorted(before, blocks, side="right") - 1, 0, len(self.segments))
        starts = self.boundaries[segment] + (blocks - before[segment]) * spec.block
        return np.minimum(starts, self.numel).astype(np.int64)

    def byte_offsets(self, codec: str, starts: Int64s) -> Int64s:
        """Byte positions, in the encoded vector, of element positions that are block boundaries."""
        spec = CODECS[codec]
        sizes = np.asarray([spec.run_bytes(size) for size in self.segments], dtype=np.int64)
        before = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        segment = np.clip(np.searchsorted(self.boundaries, starts, side="right") - 1, 0, len(self.segments))
        full_blocks = (starts - self.boundaries[segment]) // spec.block
        return (before[segment] + full_blocks * spec.block_bytes(spec.block)).astype(np.int64)

    def _blocks_before(self, spec: CodecSpec) -> Int64s:
        blocks = np.asarray([-(-size // spec.block) for size in self.segments], dtype=np.int64)
        return np.concatenate([[0], np.cumsum(blocks)]).astype(np.int64)
