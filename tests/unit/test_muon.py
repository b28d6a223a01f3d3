"""Muon with AdamW: against the formula, against torch's own, with saved and packed states, and over two ranks."""

from __future__ import annotations

import copy
import math
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load
from torch import nn

from atoll.checkpoint.own_part import OwnPart
from atoll.state.inner_state import InnerState
from atoll.state.tensors import ModelTensors
from atoll.train.adamw import make_adamw
from atoll.train.init import initialize
from atoll.train.inner import InnerStep
from atoll.train.llama import Llama, LlamaConfig
from atoll.train.muon import Muon, hidden_matrices, make_muon, orthogonalized

SHAPE = LlamaConfig(
    vocab_size=40, dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=24, max_seq_len=16
)


def make() -> Llama:
    model = Llama(SHAPE)
    initialize(model, 1)
    return model


def muon(model: nn.Module, lr: float = 1e-3, muon_lr: float = 2e-2) -> torch.optim.Optimizer:
    return make_muon(model, lr=lr, muon_lr=muon_lr, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 40, (8, 11), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        model.loss(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def reference(gradients: list[torch.Tensor], start: torch.Tensor, lr: float, decay: float) -> torch.Tensor:
    """Jordan's Muon in double precision, written out (kellerjordan.github.io/posts/muon)."""
    w, b = start.double(), torch.zeros_like(start, dtype=torch.float64)
    for gradient in gradients:
        g = gradient.double()
        b = 0.95 * b + 0.05 * g
        x = 0.05 * g + 0.95 * b
        x = x / x.norm()
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        w = w - lr * decay * w - lr * math.sqrt(max(1, w.shape[0] / w.shape[1])) * x
    return w


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24), (1, 7), (7, 1)], ids=str)
def test_a_matrix_moves_as_the_formula_says(shape: tuple[int, int]) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False))
    start = model[0].weight.detach().clone()
    gradients = [torch.randn(shape) for _ in range(4)]
    optimizer = muon(model)
    for gradient in gradients:
        model[0].weight.grad = gradient.clone()
        optimizer.step()
    wanted = reference(gradients, start, 2e-2, 0.1)
    moved = (wanted - start.double()).norm()
    assert moved > 0.02
    assert (model[0].weight.detach().double() - wanted).norm() < 0.02 * moved  # its products are bf16


def test_singular_values_come_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalized(torch.randn(48, 32)).float())
    assert 0.5 < values.min() < values.max() < 1.3


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_equals_torchs_muon_beside_torchs_adamw_to_the_bit() -> None:
    ours, theirs = make(), make()
    matrices = hidden_matrices(theirs)
    muons = torch.optim.Muon(matrices, lr=2e-2, weight_decay=0.1, momentum=0.95)
    adamw = make_adamw(theirs, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, apart=matrices)
    optimizer = muon(ours)
    for step in range(3):
        train(ours, optimizer, step, step + 1)
        theirs.loss(*batch(step)).backward()
        for each in (muons, adamw):
            each.step()
            each.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(weights(ours), weights(theirs), strict=True))
    assert not torch.equal(weights(ours)[0], weights(make())[0])


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_heads_and_vectors_are_adamws(tied: bool) -> None:
    model = Llama(LlamaConfig(**{**{f: getattr(SHAPE, f) for f in SHAPE.__slots__}, "tie_embeddings": tied}))
    names = {id(each): name for name, each in model.named_parameters()}
    chosen = {names[id(each)] for each in hidden_matrices(model)}
    assert len(chosen) == 2 * 7
    assert all("layers" in name and "norm" not in name for name in chosen)
    optimizer = muon(model)
    train(model, optimizer, 0, 1)
    for name, parameter in model.named_parameters():
        keys = set(optimizer.state[parameter])
        assert keys == ({"momentum_buffer"} if name in chosen else {"step", "exp_avg", "exp_avg_sq"}), name


def test_a_model_that_says_which_its_head_is_is_believed() -> None:
    class Saying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.out = nn.Linear(3, 3), nn.Linear(3, 9)

        def get_output_embeddings(self) -> nn.Module:
            return self.out

    model = Saying()
    assert [id(each) for each in hidden_matrices(model)] == [id(model.hidden.weight)]


def test_one_schedule_sets_both_rates() -> None:
    model = make()
    start = {name: each.detach().clone() for name, each in model.named_parameters()}
    inner = InnerStep(model, muon(model), lambda step: 0.0 if step else 1e-3)
    assert inner.step(*batch(0), 1).lr == 0.0
    assert all(torch.equal(start[name], each) for name, each in model.named_parameters())
    inner.step(*batch(0), 0)
    matrix = "model.layers.0.mlp.down_proj.weight"
    moved = model.get_parameter(matrix).detach() - start[matrix] * (1 - 2e-2 * 0.1)
    assert moved.norm() == pytest.approx(
        2e-2 * 16**0.5, rel=0.3
    )  # 16 singular values near one, times muon_lr


def test_training_lowers_the_loss_more_than_adamw_alone_at_the_same_rate() -> None:
    ours, plain = make(), make()
    adamw = make_adamw(plain, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    reached = []
    for model, optimizer in ((ours, muon(ours)), (plain, adamw)):
        inner = InnerStep(model, optimizer, lambda _: 1e-3, clip_norm=1.0)
        reached.append([inner.step(*batch(0), step).loss for step in range(30)][-1])
    assert reached[0] < reached[1] - 0.05 < math.log(40) - 0.05


def test_goes_on_from_its_own_part_to_the_bit() -> None:
    """What `Safekeeping` holds of the inner optimizer: `state_dict` apart, as JSON and safetensors, and back."""
    one, other = make(), make()
    first, second = muon(one), muon(other)
    train(one, first, 0, 3)
    part = OwnPart()
    part.hold_stateful("inner", first)
    taken = part.take()
    tensors = load(b"".join(taken.parts))
    with torch.no_grad():
        for mine, theirs in zip(other.parameters(), one.parameters(), strict=True):
            mine.copy_(theirs)
    heir = OwnPart()
    heir.hold_stateful("inner", second)
    assert not heir.give(taken.state, tensors)
    for each in (one, other):
        train(each, first if each is one else second, 3, 6)
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))

    control = make()
    with torch.no_grad():
        for mine, theirs in zip(control.parameters(), one.parameters(), strict=True):
            mine.copy_(theirs)
    again = copy.deepcopy(control)
    train(control, muon(control), 6, 7)
    train(again, _with_state(again, first), 6, 7)
    assert not torch.equal(weights(control)[1], weights(again)[1]), "momentum matters, or this shows nothing"


def _with_state(model: nn.Module, donor: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer = muon(model)
    optimizer.load_state_dict(donor.state_dict())
    return optimizer


def test_a_donors_state_is_packed_and_taken_and_adamws_is_refused() -> None:
    ours, theirs = make(), make()
    donor, joiner = muon(ours), muon(theirs)
    train(ours, donor, 0, 2)
    tensors = [ModelTensors(each.named_parameters(remove_duplicate=False)) for each in (ours, theirs)]
    data = InnerState(donor, tensors[0]).pack()
    InnerState(joiner, tensors[1]).take(data)
    tensors[1].write(tensors[0].read())
    train(ours, donor, 2, 4)
    train(theirs, joiner, 2, 4)
    assert all(torch.equal(a, b) for a, b in zip(weights(ours), weights(theirs), strict=True))
    plain = make_adamw(theirs, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    with pytest.raises(ValueError, match="it is that of Muon, this peer has AdamW"):
        InnerState(plain, tensors[1]).take(data)


def test_a_reset_forgets_all_of_the_state() -> None:
    model = make()
    optimizer = muon(model)
    train(model, optimizer, 0, 1)
    optimizer.state.clear()  # what a session does with a state that is not finite
    start = weights(model)
    train(model, optimizer, 1, 2)
    fresh = make()
    with torch.no_grad():
        for mine, theirs in zip(fresh.parameters(), start, strict=True):
            mine.copy_(theirs)
    train(fresh, muon(fresh), 1, 2)
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(fresh), strict=True))


def test_matrices_alone_need_no_adamw() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    optimizer = muon(model)
    assert isinstance(optimizer, Muon)
    model[0].weight.grad = torch.randn(4, 4)
    optimizer.step()
    assert len(optimizer.param_groups) == 1


def _rank(rank: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        model = make()
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = muon(model)
        train_sharded(model, optimizer)
        whole = {name: each.full_tensor() for name, each in model.named_parameters()}
        if rank == 0:
            torch.save(whole, os.path.join(folder, "whole.pt"))
    finally:
        dist.destroy_process_group()
    os._exit(0)  # a thread of torch's may still run, and std::terminate ends who leaves the usual way


def train_sharded(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        logits = model(batch(step)[0]).flatten(0, 1)
        nn.functional.cross_entropy(logits, batch(step)[1].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_two_ranks_that_share_a_model_step_as_one(tmp_path: Path) -> None:
    mp.start_processes(_rank, args=(str(tmp_path),), nprocs=2, start_method="spawn")
    sharded = torch.load(tmp_path / "whole.pt", weights_only=True)
    model = make()
    train(model, muon(model), 0, 3)
    for name, parameter in model.named_parameters():
        moved = (parameter.detach() - make().get_parameter(name).detach()).norm()
        assert (sharded[name] - parameter.detach()).norm() < 0.02 * moved, name
