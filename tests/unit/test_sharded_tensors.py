"""Names to tensors where a peer has several ranks: what is read and written equals the whole model's, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from atoll.errors import ConfigError
from atoll.kernels import Table
from atoll.state import own_rows
from atoll.state.ownership import sharded_ranges
from atoll.state.tensors import ModelTensors
from support.gloo_ranks import on_ranks

ROWS = (1, 7, 13, 1023)


class Odd(nn.Module):
    """Sizes that three ranks do not divide, ties, dtypes; frozen, empty and 0-dim parameters."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embed = nn.Embedding(13, 4)
        self.head = nn.Linear(4, 13, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(3, 7)
        self.rows = nn.ParameterList(nn.Parameter(torch.empty(rows, 3)) for rows in ROWS)
        self.vector = nn.Parameter(torch.empty(5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.narrow = nn.Parameter(torch.empty(4, 0))
        self.brain = nn.Parameter(torch.empty(7, 2, dtype=torch.bfloat16))
        self.half_ = nn.Parameter(torch.empty(2, dtype=torch.float16))
        self.double_ = nn.Parameter(torch.empty(3, 3, dtype=torch.float64))
        self.scale = nn.Parameter(torch.empty(()))
        for _, parameter in sorted(self.named_parameters()):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        self.frozen.requires_grad_(False)


def named(model: nn.Module, **more: Any) -> ModelTensors:
    return ModelTensors(model.named_parameters(remove_duplicate=False), **more)


def laid_out(model: nn.Module, layout: str, mesh: DeviceMesh) -> nn.Module:
    """As FSDP2 shards it; whole on every rank, plain or as DTensors; or part of it each."""
    if layout == "sharded":
        # FSDP takes one dtype a group, no empty dimension but the first and nothing of dimension 0
        apart = {p for n, p in model.named_parameters() if not p.ndim or n == "narrow"}
        fully_shard(model, mesh=mesh, ignored_params=apart)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if layout == "replicated" or (layout == "mixed" and name == "vector"):
                copy = distribute_tensor(parameter.data, mesh, [Replicate()], src_data_rank=None)
                setattr(module, name, nn.Parameter(copy, requires_grad=parameter.requires_grad))
    if layout == "mixed":
        fully_shard(model.rows, mesh=mesh)  # type: ignore[missing-attribute]
    if layout == "replicated":
        model.head.weight = model.embed.weight  # type: ignore[missing-attribute]
    return model


def cut(flat: np.ndarray, tensors: ModelTensors) -> np.ndarray:
    """What a rank owns of a vector of the whole model."""
    return np.concatenate([flat[r.start : r.stop] for r in tensors.ranges] or [flat[:0]])


def check_layouts(rank: int, num_ranks: int) -> Any:
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("ranks",))
    own_rows.BLOCK = 1000  # several blocks, and a row of more than one
    whole = named(Odd())
    digests = {"whole": named(Odd(), sum_tables=summed).frozen_digest()}
    for layout in ("sharded", "replicated", "plain", "mixed"):
        model = laid_out(Odd(), layout, mesh)
        tensors = named(model, mesh=mesh, sum_tables=summed)
        assert tensors.layout == whole.layout, layout
        shapes = [p.shape for p in whole.layout.parameters]
        assert tensors.ranges == sharded_ranges(shapes, rank, num_ranks), layout
        assert tensors.numel == sum(r.stop - r.start for r in tensors.ranges)
        flat = whole.read()
        assert np.array_equal(tensors.read(), cut(flat, tensors)), layout

        other = np.random.default_rng(3).standard_normal(whole.layout.numel, dtype=np.float32)
        reference = Odd()
        named(reference).write(other)
        tensors.write(cut(other, tensors))
        expected = dict(reference.named_parameters())
        for name, parameter in model.named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            assert torch.equal(full, expected[name]), (layout, name)
        delta = np.full(tensors.numel, np.nan, np.float32)
        tensors.subtract_from(cut(other, tensors), delta)
        assert not delta.any(), f"{layout}: no inner step is exactly no update (E24)"
        want = np.empty_like(flat)
        named(reference).subtract_from(flat, want)
        tensors.subtract_from(cut(flat, tensors), delta)
        assert np.array_equal(delta, cut(want, tensors)), layout
        digests[layout] = tensors.frozen_digest()
    owned = [[r.start, r.stop] for r in tensors.ranges]
    return {"digests": digests, "owned": owned, "numel": whole.layout.numel}


def summed(tables: list[Table]) -> list[Table]:
    """Over the ranks, modulo 2^64."""
    found = []
    for table in tables:
        total = torch.from_numpy(table.view(np.int64).copy())
        torch.distributed.all_reduce(total)
        found.append(total.numpy().view(np.uint64))
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_own_rows_are_read_and_written_however_the_model_lies_on_its_ranks(num_ranks: int) -> None:
    results = on_ranks(check_layouts, num_ranks)
    owned = sorted(tuple(r) for result in results for r in result["owned"])
    at = 0
    for start, stop in owned:
        assert start == at, "every element is owned, and by one rank"
        at = stop
    assert at == results[0]["numel"]
    plain = named(Odd()).frozen_digest()
    for result in results:
        digests = result["digests"]
        digests.pop("whole")  # every rank added the whole: only where there is one it is right
        assert set(digests.values()) == {plain}, "the same for peers with any number of ranks"


def check_refusals(rank: int, num_ranks: int) -> Any:
    mesh = init_device_mesh("cpu", (num_ranks,))
    pairs = init_device_mesh("cpu", (1, num_ranks))
    values = torch.zeros(4, 6)
    cases = {
        "columns": distribute_tensor(values, mesh, [Shard(1)]),
        "sums": DTensor.from_local(values, mesh, [Partial()], run_check=False),
        "strided": DTensor.from_local(values, mesh, [_StridedShard(0, split_factor=2)], run_check=False),
        "hsdp": distribute_tensor(values, pairs, [Replicate(), Shard(0)]),
        "uneven": DTensor.from_local(
            torch.zeros(3 if rank == 0 else 1, 6),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=(4, 6),
            stride=(6, 1),
        ),
    }
    said = {}
    for name, tensor in cases.items():
        try:
            ModelTensors(
                [
                    ("a", nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))),
                    (name, nn.Parameter(tensor)),
                ]
            )
            said[name] = "taken"
        except ConfigError as error:
            said[name] = str(error)
    try:
        ModelTensors([("b", nn.Parameter(cases["hsdp"])), ("a", nn.Parameter(values))])
    except ConfigError as error:
        said["all hsdp"] = str(error)
    return said


def test_other_placements_are_refused_with_the_parameters_name() -> None:
    for said in on_ranks(check_refusals, 2):
        assert "parameter 'columns' is placed as S" in said["columns"]
        assert "parameter 'sums' is placed as P" in said["sums"]
        assert "parameter 'strided' is placed as _S" in said["strided"]
        assert all("shard it along dimension 0" in said[name] for name in ("columns", "sums", "strided"))
        assert "parameter 'hsdp' is on" in said["hsdp"]
        assert "the one mesh of all the peer's ranks" in said["hsdp"]
        assert "only a mesh with one dimension" in said["all hsdp"]
        assert "where fully_shard puts 2" in said["uneven"]
