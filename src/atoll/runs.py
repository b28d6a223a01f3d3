"""A vector whose wire bytes follow each other in another order than its elements.

A *run* is a stretch that is contiguous in both. Each is read and written by one call of a kernel, so a vector in its
own order, which is one run, costs what it cost without all this. Runs begin where blocks do. (`plan.routes` says why
there is another order.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from atoll import kernels
from atoll.kernels import Bytes, Floats, Int64s
from atoll.values import CODECS


@dataclass(frozen=True, eq=False)
class Runs:
    """Run `i` is elements `[starts[i], starts[i] + cuts[i+1] - cuts[i])` of the vector, and `[cuts[i], cuts[i+1])` on
    the wire; `boundaries` are the block grid's, in the order of the wire.

    Lengths that do not fit are a ValueError, as with the kernels.
    """

    boundaries: Int64s
    starts: Int64s
    cuts: Int64s
    _parts: dict[str, tuple[_Part, ...]] = field(default_factory=dict, init=False, repr=False)

    @staticmethod
    def of_whole(boundaries: Int64s) -> Runs:
        """The order of the elements themselves: one run."""
        ends = boundaries[[0, -1]]
        return Runs(boundaries, ends[:-1], ends)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def numel(self) -> int:
        return int(self.boundaries[-1])

    def wire_bytes(self, codec: str) -> int:
        return int(wire_offsets(codec, self.boundaries)[-1])

    def encode(self, codec: str, values: Floats, out: Bytes) -> bool:
        """As `kernels.encode`, run by run."""
        return all(
            kernels.encode(codec, each.boundaries, values[each.own], out[each.wire])
            for each in self._cut(codec, values, out)
        )

    def decode(self, codec: str, data: Bytes, out: Floats) -> None:
        """As `kernels.decode`, run by run."""
        for each in self._cut(codec, out, data):
            kernels.decode(codec, each.boundaries, data[each.wire], out[each.own])

    def encode_with_feedback(
        self, codec: str, delta: Floats, residual: Floats, beta: float, out: Bytes
    ) -> bool:
        """As `kernels.encode_with_feedback`, run by run."""
        return all(
            kernels.encode_with_feedback(
                codec, each.boundaries, delta[each.own], residual[each.own], beta, out[each.wire]
            )
            for each in self._cut(codec, delta, out)
        )

    def update_residual(self, codec: str, delta: Floats, beta: float, data: Bytes, residual: Floats) -> None:
        """As `kernels.update_residual`, run by run."""
        for each in self._cut(codec, delta, data):
            kernels.update_residual(
                codec, each.boundaries, delta[each.own], beta, data[each.wire], residual[each.own]
            )

    def _cut(self, codec: str, values: Floats, data: Bytes) -> tuple[_Part, ...]:
        """ValueError if a vector, or its wire bytes, have another length than the runs together."""
        if codec not in self._parts:
            self._parts[codec] = tuple(self._make_parts(codec))
        parts = self._parts[codec]
        wire_bytes = parts[-1].wire.stop if parts else 0
        if (values.size, data.size) != (self.numel, wire_bytes):
            raise ValueError(
                f"{values.size} elements in {data.size} bytes; {self.numel} elements in {codec} take {wire_bytes}"
            )
        return parts

    def _make_parts(self, codec: str) -> Iterator[_Part]:
        places = np.searchsorted(self.boundaries, self.cuts)
        offsets = wire_offsets(codec, self.boundaries)[places]
        for run, start in enumerate(self.starts.tolist()):
            segments = self.boundaries[places[run] : places[run + 1] + 1]
            own = slice(start, start + int(segments[-1] - segments[0]))
            yield _Part(own, slice(int(offsets[run]), int(offsets[run + 1])), segments - segments[0])


@dataclass(frozen=True, slots=True)
class _Part:
    """A run in one codec: its elements in the vector, its bytes on the wire, its blocks."""

    own: slice
    wire: slice
    boundaries: Int64s


def wire_offsets(codec: str, boundaries: Int64s) -> Int64s:
    """Byte positions, in the encoded vector, of all `boundaries`."""
    spec = CODECS[codec]
    full, tail = np.divmod(np.diff(boundaries), spec.block)
    tail_bytes = spec.header_bytes + (np.minimum(tail, spec.kept) * spec.bits + 7) // 8
    sizes = full * spec.block_bytes(spec.block) + np.where(tail > 0, tail_bytes, 0)
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
