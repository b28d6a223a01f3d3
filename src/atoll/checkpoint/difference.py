"""How far two checkpoints of one model are from each other, parameter by parameter."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from atoll import kernels
from atoll.checkpoint.choosing import Chosen
from atoll.errors import ConfigError
from atoll.state.manifest import Vector


class ParameterDifference(msgspec.Struct, frozen=True, kw_only=True):
    """`norm` is the L2 norm of a - b, `relative` that over the norm of b (inf where only b is zero)."""

    name: str
    shape: tuple[int, ...]
    norm: float
    relative: float
    largest: float
    differing: int


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters in the order of their names; `total` is over all of them."""

    a: str
    b: str
    vector: str
    total: ParameterDifference
    parameters: tuple[ParameterDifference, ...]


def difference(a: Chosen, b: Chosen, vector: Vector) -> Difference:
    """Compare one vector of two checkpoints. Reads both, a million elements at a time. Raises ConfigError if their
    models differ."""
    ours, theirs = a.description().parameters, b.description().parameters
    for mine, other in zip(ours, theirs, strict=False):
        if (mine.name, mine.shape) != (other.name, other.shape):
            raise ConfigError(
                f"these are two models: {a.name} has {mine.name} {list(mine.shape)} where {b.name} has "
                f"{other.name} {list(other.shape)}"
            )
    if len(ours) != len(theirs):
        raise ConfigError(
            f"these are two models: {a.name} has {len(ours)} parameters, {b.name} {len(theirs)}"
        )
    layout = a.description().layout
    rows = [
        _compared(a, b, vector, each.name, each.shape, range_.start, range_.stop)
        for each, range_ in zip(layout.parameters, layout.ranges, strict=True)
    ]
    norm = math.sqrt(sum(row[0] for row in rows))
    reference = math.sqrt(sum(row[1] for row in rows))
    total = ParameterDifference(
        name="all",
        shape=(layout.numel,),
        norm=norm,
        relative=_ratio(norm, reference),
        largest=max((row[2].largest for row in rows), default=0.0),
        differing=sum(row[2].differing for row in rows),
    )
    return Difference(
        a=a.name, b=b.name, vector=vector, total=total, parameters=tuple(row[2] for row in rows)
    )


def _compared(
    a: Chosen, b: Chosen, vector: Vector, name: str, shape: tuple[int, ...], start: int, stop: int
) -> tuple[float, float, ParameterDifference]:
    """The squared norms of the difference and of b, and the row."""
    squared = reference = largest = 0.0
    differing = 0
    for first in range(start, stop, kernels.PIECE):
        last = min(first + kernels.PIECE, stop)
        right = b.read(vector, first, last).astype(np.float64)
        apart = a.read(vector, first, last).astype(np.float64) - right
        squared += float(apart @ apart)
        reference += float(right @ right)
        largest = max(largest, float(np.abs(apart).max()))
        differing += int(np.count_nonzero(apart))
    norm = math.sqrt(squared)
    row = ParameterDifference(
        name=name,
        shape=shape,
        norm=norm,
        relative=_ratio(norm, math.sqrt(reference)),
        largest=largest,
        differing=differing,
    )
    return squared, reference, row


def _ratio(norm: float, reference: float) -> float:
    if reference:
        return norm / reference
    return math.inf if norm else 0.0
