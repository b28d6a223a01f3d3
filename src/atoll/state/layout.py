"""The layout of a model in global coordinates: parameters in order, each covering a range of one long vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from atoll.values import ParameterInfo, Range


@dataclass(frozen=True)
class Layout:
    """Parameters in the order of their names, so that module order on a peer does not matter."""

    parameters: tuple[ParameterInfo, ...]

    @staticmethod
    def of(parameters: Sequence[ParameterInfo]) -> Layout:
        return Layout(tuple(sorted(parameters, key=lambda p: p.name)))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each parameter; 1 for a 0-dim one, 0 for an empty one."""
        return tuple(math.prod(p.shape) for p in self.parameters)

    @cached_property
    def numel(self) -> int:
        return sum(self.sizes)

    @cached_property
    def ranges(self) -> tuple[Range, ...]:
        """Where each parameter lies in the long vector."""
        ranges, start = [], 0
        for size in self.sizes:
            ranges.append(Range(start, start + size))
            start += size
        return tuple(ranges)
