"""Training on the ranks of one peer is training on one: the same batch, loss, gradient norm and weights."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from atoll.config.schema import DataSection, InnerSection, ModelSection, RunConfig
from atoll.errors import ConfigError
from atoll.state.inner_state import InnerState
from atoll.state.tensors import ModelTensors
from atoll.train.adamw import make_adamw
from atoll.train.evaluate import validation_loss
from atoll.train.init import initialize
from atoll.train.inner import InnerStep
from atoll.train.llama import Llama, LlamaConfig
from atoll.train.models import build_inner, build_model
from atoll.train.ranks import ALONE, Ranks
from atoll.train.sample import sample_tokens
from atoll.train.sharding import Sharding, gathered, layers_of, shard
from support.gloo_ranks import on_ranks

BATCH = 12


class OwnHead(nn.Module):
    """A language model whose loss uses weights itself, outside of any forward; with a parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(40, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.short = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.tensor(3.0))
        self.blocks[0].weight.requires_grad_(False)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        logits = hidden @ self.embed.weight.t() * self.temperature
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def llama(tied: bool = False) -> Llama:
    shape = LlamaConfig(
        vocab_size=41,
        dim=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        ffn_dim=25,
        max_seq_len=16,
        tie_embeddings=tied,
    )
    model = Llama(shape)
    initialize(model, 1)
    return model


def batch(seed: int, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 40, (size, 11), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def stepper(model: nn.Module, ranks: Ranks = ALONE, **more: Any) -> InnerStep:
    optimizer = make_adamw(model, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    return InnerStep(model, optimizer, lambda _: 1e-2, ranks=ranks, **more)  # type: ignore[arg-type]


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def same_as_alone(
    make: Callable[[], nn.Module], how: Sharding | None, num_ranks: int, *, digits: int = 12, **more: Any
) -> list[tuple[float, float, bool]]:
    """Train both ways for some steps; what is reported, and the weights, must be equal to so many digits.

    Without a `how` every rank has the whole model.
    """
    mesh = init_device_mesh("cpu", (num_ranks,))
    alone, together = make(), make()
    if digits == 12:
        alone, together = alone.double(), together.double()
    if how is not None:
        shard(together, mesh, how)
    one, many = stepper(alone, **more), stepper(together, Ranks.of(mesh), **more)
    seen = []
    for step in range(3):
        a, b = one.step(*batch(step), step), many.step(*batch(step), step)
        assert (a.tokens, a.clipped, a.skipped) == (b.tokens, b.clipped, b.skipped)
        assert b.loss == pytest.approx(a.loss, rel=10**-digits)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=5 * 10**-digits)
        seen.append((b.loss, b.grad_norm, b.clipped))
    expected = whole(alone)
    for name, tensor in whole(together).items():
        assert tensor.dtype == expected[name].dtype, name
        if digits > 2:  # Adam's steps are as large for the noise of bf16
            torch.testing.assert_close(
                tensor, expected[name], rtol=0, atol=10**-digits, msg=lambda said, at=name: f"{at}: {said}"
            )
    return seen


def check_training(rank: int, num_ranks: int) -> Any:
    seen = {
        "tied": same_as_alone(lambda: llama(tied=True), Sharding(), num_ranks, clip_norm=0.1),
        "own head": same_as_alone(OwnHead, Sharding(), num_ranks, clip_norm=0.2, micro_batch=3),
        "fp32": same_as_alone(llama, Sharding(), num_ranks, digits=4, clip_norm=0.1),
    }
    if num_ranks == 2:
        kept, offloaded = Sharding(reshard_after_forward=False), Sharding(cpu_offload=True)
        bf16 = Sharding(param_dtype=torch.bfloat16)
        seen |= {
            "kept": same_as_alone(llama, kept, num_ranks, micro_batch=1),
            "offloaded": same_as_alone(llama, offloaded, num_ranks, clip_norm=1e9),
            "whole": same_as_alone(OwnHead, None, num_ranks, clip_norm=0.2),
            "bf16": same_as_alone(llama, bf16, num_ranks, digits=2, clip_norm=0.1),
            "autocast": same_as_alone(llama, Sharding(), num_ranks, digits=2, autocast=True),
        }
        assert not any(clipped for *_, clipped in seen["offloaded"])
        assert seen["bf16"] != seen["fp32"], "it computes in less"
    assert all(clipped for *_, clipped in seen["tied"])
    return seen


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_sharded_peer_trains_as_one_rank_does(num_ranks: int) -> None:
    first, *others = on_ranks(check_training, num_ranks)
    assert all(other == first for other in others), "all ranks report the same numbers, to the bit"


def check_compiled(rank: int, num_ranks: int) -> Any:
    return same_as_alone(llama, Sharding(), num_ranks, digits=4, compile=True, clip_norm=0.1)


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler"
)
def test_a_compiled_loss_is_sharded_too() -> None:
    first, second = on_ranks(check_compiled, 2)
    assert first == second


class Spoiled(nn.Module):
    """Its loss is not a number on one rank, at the second step."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner = llama()
        self.rank, self.calls = rank, 0

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = self.inner.loss(inputs, targets)
        return loss * math.nan if self.calls == 2 and self.rank == 1 else loss


def check_odds_and_ends(rank: int, num_ranks: int, folder: str) -> Any:
    mesh = init_device_mesh("cpu", (num_ranks,))
    ranks = Ranks.of(mesh)
    seen: dict[str, Any] = {}

    # one rank's loss is not finite: all skip
    spoiled = Spoiled(rank)
    shard(spoiled, mesh)
    inner = stepper(spoiled, ranks, clip_norm=1.0)
    reports = [inner.step(*batch(0), 0)]
    before = whole(spoiled)
    reports.append(inner.step(*batch(1), 1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in whole(spoiled).items())
    reports.append(inner.step(*batch(2), 2))
    seen["skipped"] = [report.skipped for report in reports]

    # evaluation: shared out, and of the weights as they are afterwards too
    sequences = torch.randint(0, 40, (7, 9), generator=torch.Generator().manual_seed(3))
    for keep in (True, False):
        model, alone = llama(tied=True).double(), llama(tied=True).double()
        shard(model, mesh, Sharding(reshard_after_forward=not keep))
        tensors = ModelTensors(model.named_parameters(remove_duplicate=False))
        for scale in (1.0, 3.0):
            own = tensors.read() * scale
            tensors.write(own)
            reference = ModelTensors(alone.named_parameters(remove_duplicate=False))
            reference.write(reference.read() * scale)
            for micro_batch in (0, 1, 2):
                loss = validation_loss(model, sequences, micro_batch=micro_batch, ranks=ranks)
                assert loss == pytest.approx(validation_loss(alone, sequences), rel=1e-12), (keep, scale)
                seen[f"loss {keep} {scale} {micro_batch}"] = loss
        seen["sample"] = sample_tokens(model, [1, 2], max_new_tokens=3, temperature=0)
        assert seen["sample"] == sample_tokens(alone, [1, 2], max_new_tokens=3, temperature=0)

    # the whole weights are on rank 0, and nowhere else
    found = gathered(model.named_parameters())
    assert list(found) == ([name for name, _ in alone.named_parameters()] if rank == 0 else [])
    assert all(torch.equal(tensor, alone.get_parameter(name)) for name, tensor in found.items())

    # built in pieces, by seed or from a folder, to the same bits as in one
    for tied in (True, False):
        config = run_config(tied=tied)
        for start in ("", folder):
            section = config.model.model_copy(update={"init_from": start if tied else ""})
            one = config.model_copy(update={"model": section})
            built, reference_model = build_model(one, mesh=mesh), build_model(one)
            expected = whole(reference_model)
            assert all(torch.equal(tensor, expected[name]) for name, tensor in whole(built).items())
            assert len(list(built.parameters())) == len(list(reference_model.parameters())), "tied it stays"
            numel = sum(p.to_local().numel() for p in built.parameters() if isinstance(p, DTensor))
            assert numel < reference_model.config.num_parameters() * 0.6
            a = build_inner(reference_model, one).step(*batch(0), 0)
            b = build_inner(built, one, ranks).step(*batch(0), 0)
            assert b.loss == pytest.approx(a.loss, rel=1e-5)
    try:
        build_model(run_config(batch_size=7), mesh=mesh)
    except ConfigError as error:
        seen["refused"] = str(error)

    # the optimizer's own state: this rank's rows, and no other's
    state = InnerState(inner.optimizer, ModelTensors(spoiled.named_parameters(remove_duplicate=False)))
    data = state.pack()
    theirs = Spoiled(rank)
    shard(theirs, mesh)
    joiner = stepper(theirs, ranks)
    taker = InnerState(joiner.optimizer, ModelTensors(theirs.named_parameters(remove_duplicate=False)))
    taker.take(data)
    ours, taken = load(data), load(taker.pack())
    assert ours.keys() == taken.keys()
    assert all(torch.equal(ours[name], taken[name]) for name in ours)
    joiner.step(*batch(3), 3)  # it goes on
    exchanged: list[Any] = [None] * num_ranks
    torch.distributed.all_gather_object(exchanged, data)
    with pytest.raises(ValueError, match=r"its exp_avg\w* of '.*' has shape .*, the parameter "):
        taker.take(exchanged[1 - rank])
    return seen


def run_config(tied: bool = False, batch_size: int = BATCH) -> RunConfig:
    model = ModelSection(
        vocab_size=41, dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=25, max_seq_len=16,
        tie_embeddings=tied,
    )  # fmt: skip
    return RunConfig(model=model, data=DataSection(seq_len=10), inner=InnerSection(batch_size=batch_size))


def test_a_sharded_peer_decides_evaluates_and_is_built_together(tmp_path: Path) -> None:
    start = llama(tied=True)
    initialize(start, 99)
    save_file(dict(start.named_parameters()), tmp_path / "model.safetensors")
    first, second = on_ranks(check_odds_and_ends, 2, str(tmp_path))
    assert first == second
    assert first["skipped"] == [False, True, False]
    assert "inner.batch_size = 7 is not a multiple of this peer's 2 ranks" in first["refused"]


def test_the_layers_are_the_longest_stretch_of_equals() -> None:
    model = OwnHead()
    assert layers_of(model) == list(model.blocks)
    made = llama()
    assert layers_of(made) == list(made.model.layers)
    assert layers_of(nn.Linear(2, 2)) == []
