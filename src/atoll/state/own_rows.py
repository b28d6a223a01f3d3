"""One parameter as a rank of its peer sees it: the rows that the rank owns, as ordinary tensors.

The one place that unwraps DTensors. A parameter that `fully_shard` has cut is here with its own slice only. One that
every rank holds whole (a plain tensor, or `Replicate`) is *owned* by slices of the same rows, so that what is kept for
each element in host memory is shared out all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from atoll.errors import ConfigError
from atoll.state.ownership import rows_of

BLOCK: Final = 1 << 22
"""Elements that are read or written at once: what a conversion needs beside the tensors themselves."""


@dataclass(frozen=True, slots=True)
class OwnRows:
    """`tensor` is the parameter as the model has it; `first` and `stop` are this rank's rows of the whole."""

    tensor: Tensor
    first: int
    stop: int
    sharded: bool

    @property
    def start(self) -> int:
        """Elements of the whole parameter that lie before the own rows."""
        return self.first * (self.tensor.numel() // max(len(self.tensor), 1)) if self.tensor.ndim else 0

    def own(self) -> Tensor:
        """The own rows: a view, made anew each time since FSDP may replace what is behind it. Without gradient."""
        here = local_of(self.tensor)
        if self.sharded:
            return here
        if not here.ndim:
            return here if self.first < self.stop else here.new_empty(0)
        return here[self.first : self.stop]

    def rows_of(self, rank: int, num_ranks: int) -> Tensor:
        """The rows that `rank` owns, of a parameter that every rank holds whole."""
        first, stop = owned_rows(self.tensor, rank, num_ranks)
        return OwnRows(self.tensor, first, stop, sharded=False).own()


def owned_rows(tensor: Tensor, rank: int, num_ranks: int) -> tuple[int, int]:
    """First row and the row after the last; a 0-dim tensor counts as one row, which is the first rank's."""
    return rows_of(len(tensor) if tensor.ndim else 1, rank, num_ranks)


def local_of(tensor: Tensor) -> Tensor:
    """What of `tensor` lies on this rank, without gradient."""
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def laid_out(value: Tensor, like: Tensor) -> Tensor:
    """A rank's rows, as part of a whole that is cut as `like` is."""
    if not isinstance(like, DTensor):
        return value
    return DTensor.from_local(
        value.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def own_rows(name: str, tensor: Tensor, mesh: DeviceMesh | None) -> OwnRows:
    """The part of this rank of `mesh`; without one it owns everything. Raises ConfigError, naming the parameter, where
    it is laid out in a way that has no rows of its own on every rank."""
    if mesh is not None and mesh.ndim != 1:
        raise ConfigError(
            f"parameter {name!r} is on {mesh}: only a mesh with one dimension, that of all the peer's ranks, can be "
            "synchronised; shard the model over such a one"
        )
    rank, num_ranks = (mesh.get_local_rank(), mesh.size()) if mesh is not None else (0, 1)
    if tensor.is_meta:
        raise ConfigError(f"parameter {name!r} has no values yet (device meta): initialise the model first")
    sharded = False
    if isinstance(tensor, DTensor):
        if tensor.device_mesh != mesh:
            raise ConfigError(
                f"parameter {name!r} is on {tensor.device_mesh}, the peer on {mesh}: shard every parameter "
                "on the one mesh of all the peer's ranks"
            )
        (placement,) = tensor.placements
        # exact classes: the strided shards of a second parallelism are Shards too
        sharded = type(placement) is Shard and placement.dim == 0
        if not sharded and type(placement) is not Replicate:
            raise ConfigError(
                f"parameter {name!r} is placed as {placement}: only rows that are cut (Shard(0), as fully_shard does "
                "it) or whole copies (Replicate) can be synchronised; shard it along dimension 0"
            )
    first, stop = owned_rows(tensor, rank, num_ranks)
    if sharded and len(local_of(tensor)) != stop - first:
        raise ConfigError(
            f"parameter {name!r} has {len(local_of(tensor))} of its {len(tensor)} rows on rank {rank} of {num_ranks}, "
            f"where fully_shard puts {stop - first}: shard it with fully_shard"
        )
    return OwnRows(tensor, first, stop, sharded)


def held_rows(name: str, parameter: Tensor) -> tuple[Tensor, int]:
    """What of a parameter lies on this rank, and how many of its elements lie before that. Raises ConfigError."""
    part = own_rows(name, parameter, parameter.device_mesh if isinstance(parameter, DTensor) else None)
    return local_of(parameter), part.start if part.sharded else 0


def set_from_whole(name: str, parameter: Tensor, whole: Tensor) -> None:
    """Set what of a parameter lies on this rank from a tensor of the whole. Raises ConfigError."""
    here, first = held_rows(name, parameter)
    rows = whole[first * len(whole) // max(whole.numel(), 1) :][: len(here)] if here.ndim else whole
    with torch.no_grad():
        here.copy_(rows)


def blocks(tensor: Tensor) -> Iterator[tuple[Tensor, int]]:
    """`tensor` in views of at most `BLOCK` elements, in logical order, each with the elements before it."""
    if tensor.numel() <= BLOCK:
        if tensor.numel():
            yield tensor, 0
        return
    row = tensor.numel() // len(tensor)
    if row <= BLOCK:
        rows = BLOCK // row
        for first in range(0, len(tensor), rows):
            yield tensor[first : first + rows], first * row
    else:
        for number, each in enumerate(tensor):
            for block, start in blocks(each):
                yield block, number * row + start
