"""Names to tensors: the one place that reads and writes a model's parameters as one flat fp32 vector.

Values move in logical order whatever the strides. Tied weights count once; parameters that overlap in any other way
are refused by name. Frozen parameters do not travel: they are part of what peers compare when they declare.

Where a peer has several ranks, each reads and writes the rows that it owns (`state.ownership`), one range after the
other: its *own vector*. The layout is that of the whole model on every rank.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from atoll import kernels
from atoll.errors import ConfigError
from atoll.kernels import Table
from atoll.state.layout import Layout
from atoll.state.own_rows import OwnRows, blocks, local_of, own_rows
from atoll.state.ownership import sharded_ranges
from atoll.state.staging import Staging
from atoll.values import ParameterInfo, Range

Floats = NDArray[np.float32]
SumTables = Callable[[list[Table]], list[Table]]
_COMPILED = "_orig_mod."


class ModelTensors:
    """The trainable parameters of one model, in the order of the layout. All calls are on the training thread."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        *,
        mesh: DeviceMesh | None = None,
        sum_tables: SumTables = lambda tables: tables,
    ) -> None:
        """`named_parameters` as `model.named_parameters(remove_duplicate=False)` gives them: with every name of a tied
        weight, so that module order does not decide which one it goes by.

        `mesh` is that of the peer's ranks; by default that of the first parameter that is sharded, and without one
        this is the only rank. `sum_tables` adds up digest tables (modulo 2^64) over the ranks.
        Raises ConfigError for overlapping storage, and for a parameter that is placed in a way that has no own rows.
        """
        named = {name.replace(_COMPILED, ""): tensor for name, tensor in named_parameters}
        mesh = mesh or next((t.device_mesh for _, t in sorted(named.items()) if isinstance(t, DTensor)), None)
        parts = {name: own_rows(name, tensor, mesh) for name, tensor in sorted(named.items())}
        self._group = mesh.get_group() if mesh is not None and mesh.size() > 1 else None
        self.rank, self.num_ranks = (mesh.get_local_rank(), mesh.size()) if mesh is not None else (0, 1)
        self._device = mesh.device_type if mesh is not None else "cpu"
        self._sum_tables = sum_tables
        self._frozen = {name: part for name, part in parts.items() if not part.tensor.requires_grad}
        trainable = _without_ties({name: t for name, t in named.items() if t.requires_grad})
        self.layout = Layout.of([_info(name, tensor) for name, tensor in trainable.items()])
        self._parts = tuple(parts[p.name] for p in self.layout.parameters)
        self.tensors = tuple(part.tensor for part in self._parts)
        shapes = [p.shape for p in self.layout.parameters]
        self.ranges: tuple[Range, ...] = sharded_ranges(shapes, self.rank, self.num_ranks)
        """What this rank owns of the layout's one vector, ascending, no two adjacent."""
        self.numel = sum(range_.stop - range_.start for range_ in self.ranges)
        """Elements of the own vector."""
        self.written: Callable[[], None] = lambda: None
        """Called after each `write`, by which time what follows from the weights may be made anew."""
        self._staging: dict[torch.device, Staging] = {}
        if self.layout.numel == 0:
            raise ConfigError("the model has no trainable element: nothing could be synchronised")

    def read(self) -> Floats:
        """The local weights that this rank owns, as a new fp32 vector of `numel` elements."""
        flat = torch.empty(self.numel, dtype=torch.float32)
        with torch.no_grad():
            for block, piece in self._on_host(flat):
                piece.copy_(block)
        return flat.numpy()

    def write(self, values: Floats) -> None:
        """Set the local weights (rounded to each parameter's dtype) from the own vector.

        Blocks. Where the peer has several ranks, all call it together: what every rank holds whole is passed around.
        """
        with torch.no_grad():
            for device, pairs in itertools.groupby(
                self._pieces(torch.from_numpy(values)), lambda pair: pair[0].device
            ):
                if device.type == "cuda":
                    self._staging_of(device).to_device(pairs)
                else:
                    for block, piece in pairs:
                        block.copy_(piece)
            for part in self._parts if self.num_ranks > 1 else ():
                if not part.sharded:
                    self._pass_around(part)
        self.written()

    def subtract_from(self, anchor: Floats, out: Floats) -> None:
        """out = anchor - local weights: the pseudo-gradient, all of it of the own vector.

        Like minus like: the anchor is rounded to the parameter's dtype first, so that no inner step gives exactly 0
        also for bf16 weights (E24).
        """
        starts = self._pieces(torch.from_numpy(anchor))
        with torch.no_grad():
            for (block, difference), (_, start) in zip(
                self._on_host(torch.from_numpy(out)), starts, strict=True
            ):
                if block.dtype == torch.float32:
                    torch.sub(start, block, out=difference)
                else:
                    wide = torch.float64 if block.dtype == torch.float64 else torch.float32
                    difference.copy_(start.to(block.dtype).to(wide) - block.to(wide))

    def frozen_digest(self) -> str:
        """SHA-256 over names, shapes and values of the parameters that do not travel; "" if there are none.

        The same however many ranks a peer has: each adds what it owns. All of them call it together.
        """
        if not self._frozen:
            return ""
        digest = hashlib.sha256()
        tables = self._sum_tables([_table(part) for part in self._frozen.values()])
        for (name, part), table in zip(self._frozen.items(), tables, strict=True):
            digest.update(f"{name}{tuple(part.tensor.shape)}".encode())
            digest.update(kernels.state_digest([table]).encode())
        return digest.hexdigest()

    def layout_digest(self) -> str:
        """SHA-256 over what must be equal on all ranks of a peer: every parameter's name, shape and dtype, whether it
        is trained and whether it is cut."""
        digest = hashlib.sha256()
        named = {p.name: part for p, part in zip(self.layout.parameters, self._parts, strict=True)}
        for name, part in sorted((named | self._frozen).items()):
            digest.update(f"{_info(name, part.tensor)} {part.tensor.requires_grad} {part.sharded}\n".encode())
        return digest.hexdigest()

    def _pieces(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The own rows of each parameter in blocks, each with its piece of the own vector."""
        if flat.numel() != self.numel:
            raise ValueError(f"the vector has {flat.numel()} elements, this rank owns {self.numel}")
        at = 0
        for part in self._parts:
            own = part.own()
            for block, start in blocks(own):
                yield block, flat[at + start : at + start + block.numel()].view(block.shape)
            at += own.numel()

    def _on_host(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """`_pieces`, with the blocks in host memory and in their own dtype."""
        for device, pairs in itertools.groupby(self._pieces(flat), lambda pair: pair[0].device):
            if device.type == "cuda":
                ours, theirs = itertools.tee(pairs)
                moved = self._staging_of(device).to_host(block for block, _ in ours)
                yield from zip(moved, (piece for _, piece in theirs), strict=True)
            else:
                for block, piece in pairs:
                    yield block.to("cpu"), piece

    def _staging_of(self, device: torch.device) -> Staging:
        if device not in self._staging:
            self._staging[device] = Staging(device)
        return self._staging[device]

    def _pass_around(self, part: OwnRows) -> None:
        """Every rank gets every rank's rows of a parameter that is whole on each."""
        for owner in range(self.num_ranks):
            for block, _ in blocks(part.rows_of(owner, self.num_ranks)):
                whole = block.to(self._device).contiguous()  # the block itself, where it can be
                dist.broadcast(whole, group_src=owner, group=self._group)
                if whole.data_ptr() != block.data_ptr():
                    block.copy_(whole)


def _info(name: str, tensor: Tensor) -> ParameterInfo:
    return ParameterInfo(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def _table(part: OwnRows) -> Table:
    """The digest table of the parameter's values, of the own rows' share alone."""
    table = np.zeros((-(-part.tensor.numel() // kernels.PIECE), 2), np.uint64)
    for block, start in blocks(part.own()):
        values = block.to("cpu", torch.float32).contiguous().flatten().numpy()
        rows = kernels.digest_pieces(values, part.start + start)
        first = (part.start + start) // kernels.PIECE
        table[first : first + len(rows)] += rows
    return table


def _without_ties(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keep the alphabetically first name of each storage; refuse storages that overlap in any other way."""
    kept: dict[str, Tensor] = {}
    seen: set[object] = set()
    for name, tensor in sorted(named.items()):
        if not seen.intersection(keys := _keys(tensor)):
            kept[name] = tensor
        seen.update(keys)
    spans = sorted((*_span(local_of(t)), name) for name, t in kept.items() if local_of(t).numel())
    for (_, stop, first), (start, _, second) in itertools.pairwise(spans):
        if start < stop:
            raise ConfigError(
                f"parameters {first!r} and {second!r} share storage without being tied as a whole; "
                "give each its own storage, or use one parameter in both places"
            )
    return kept


def _keys(tensor: Tensor) -> set[object]:
    """Tensors that share one of these are one parameter. Of a DTensor only the object itself says so: its slice may be
    empty here, and the ranks must find the same ties."""
    if isinstance(tensor, DTensor) or not tensor.numel():
        return {id(tensor)}
    return {id(tensor), (tensor.data_ptr(), tensor.shape, tensor.stride())}


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte and the byte after the last that the tensor touches."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
