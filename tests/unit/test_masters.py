"""bf16 weights with fp32 masters: small steps add up, copies follow, no step gives no pseudo-gradient (K13, E24)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from atoll.state.tensors import ModelTensors
from atoll.train.adamw import make_adamw
from atoll.train.init import initialize
from atoll.train.inner import InnerStep
from atoll.train.llama import Llama, LlamaConfig
from atoll.train.masters import Masters


class Falling(nn.Module):
    """Its loss falls by one per unit of `weight`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.weight.sum()


def make(tied: bool = False) -> Llama:
    model = Llama(
        LlamaConfig(
            vocab_size=40,
            dim=16,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            ffn_dim=24,
            max_seq_len=16,
            tie_embeddings=tied,
        )
    )
    initialize(model, 1)
    return model


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 40, (8, 11), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def prepared(model: Llama, **options: object) -> tuple[ModelTensors, InnerStep]:
    tensors = ModelTensors(model.named_parameters(remove_duplicate=False))
    optimizer = make_adamw(model, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    inner = InnerStep(model, optimizer, lambda _: 1e-3, **options)
    inner.masters = Masters(model)
    tensors.written = inner.weights_changed
    return tensors, inner


def copies_are_the_masters_rounded(model: nn.Module, masters: Masters) -> bool:
    return all(
        torch.equal(each, masters.of(each).bfloat16()) and masters.of(each).dtype is torch.float32
        for each in model.parameters()
    )


def test_a_hundred_steps_of_a_thousandth_add_up_in_the_master() -> None:
    model = Falling()
    tensors = ModelTensors(model.named_parameters())
    inner = InnerStep(model, torch.optim.SGD(model.parameters(), lr=1e-3), lambda _: 1e-3)
    inner.masters = Masters(model)
    for step in range(100):
        assert not inner.step(torch.zeros(1, 1), torch.zeros(1, 1), step).skipped
    assert tensors.read().tolist() == pytest.approx([0.9], abs=1e-5)
    assert model.weight.dtype is torch.bfloat16
    assert model.weight.item() == torch.tensor(0.9).bfloat16().item()

    control = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([control], lr=1e-3)
    for _ in range(100):
        control.grad = torch.ones_like(control)
        optimizer.step()
    assert control.item() == 1.0, "without a master no step would be seen, or this shows nothing"


@pytest.mark.parametrize("tied", [False, True])
def test_no_inner_step_gives_exactly_zero(tied: bool) -> None:
    model = make(tied)
    tensors, inner = prepared(model)
    anchor = tensors.read() * np.float32(1.2345)
    tensors.write(anchor)
    delta = np.empty_like(anchor)
    tensors.subtract_from(anchor, delta)
    assert not delta.any()
    assert np.array_equal(tensors.read(), anchor)
    assert inner.masters is not None
    assert copies_are_the_masters_rounded(model, inner.masters)
    naive = anchor - ModelTensors(model.named_parameters(remove_duplicate=False)).read()
    assert naive.any(), "the copies differ from the anchor, or this shows nothing"


def test_the_layout_is_that_of_a_peer_that_computes_in_fp32() -> None:
    plain = ModelTensors(make().named_parameters(remove_duplicate=False))
    tensors, _ = prepared(make())
    assert tensors.layout == plain.layout
    assert np.array_equal(tensors.read(), plain.read())


@pytest.mark.parametrize("tied", [False, True])
def test_copies_follow_each_step_and_training_goes_as_in_fp32(tied: bool) -> None:
    model, plain = make(tied), make(tied)
    _, inner = prepared(model, clip_norm=1.0)
    optimizer = make_adamw(plain, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    exact = InnerStep(plain, optimizer, lambda _: 1e-3, clip_norm=1.0)
    assert inner.masters is not None
    fell = []
    for step in range(20):  # one batch, so that what was learned shows
        loss, exact_loss = inner.step(*batch(0), step).loss, exact.step(*batch(0), step).loss
        fell.append(exact_loss)
        assert loss == pytest.approx(exact_loss, abs=0.05 * (fell[0] - min(fell)) + 0.005)
        assert copies_are_the_masters_rounded(model, inner.masters)
        assert all(each.grad is None for each in model.parameters())
    assert fell[0] - fell[-1] > 0.2, "it learns, or this shows nothing"


def test_gradients_of_parts_are_added_up_in_fp32() -> None:
    model, twin = make(), make()
    masters, _ = Masters(model), Masters(twin)
    inputs, targets = batch(0)
    wanted = [torch.zeros(each.shape) for each in twin.parameters()]
    for row in range(len(inputs)):
        part = slice(row, row + 1)
        model.loss(inputs[part], targets[part]).backward()
        masters.collect()
        twin.loss(inputs[part], targets[part]).backward()
        for total, each in zip(wanted, twin.parameters(), strict=True):
            assert each.grad is not None
            total += each.grad.float()
            each.grad = None
    found = [masters.of(each).grad for each in model.parameters()]
    assert all(
        each is not None and torch.equal(each, total) for each, total in zip(found, wanted, strict=True)
    )
    assert any(not torch.equal(each, each.bfloat16().float()) for each in wanted), "or bf16 would do as well"


def test_frozen_weights_are_rounded_in_place_and_have_no_master() -> None:
    model = make()
    frozen = model.model.embed_tokens.weight.requires_grad_(False)
    tensors, inner = prepared(model)
    assert frozen is model.model.embed_tokens.weight
    assert frozen.dtype is torch.bfloat16
    assert inner.masters is not None
    assert inner.masters.of(frozen) is frozen
    assert not any("embed" in each.name for each in tensors.layout.parameters)
    assert not inner.step(*batch(0), 0).skipped


def test_buffers_keep_their_precision() -> None:
    model = make()
    prepared(model)
    assert model.model.rope_cos.dtype is torch.float32
