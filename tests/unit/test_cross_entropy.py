"""The loss in chunks against the loss in one piece, and the z-loss against its formula."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from atoll.config.load import load
from atoll.train.cross_entropy import token_loss
from atoll.train.evaluate import validation_loss
from atoll.train.init import initialize
from atoll.train.llama import Llama, LlamaConfig
from atoll.train.models import build_inner, build_model
from support.alive import Alive

VOCAB, WIDTH, BATCH, LENGTH = 300, 16, 3, 20
COUNT = BATCH * LENGTH


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def problem(dtype: torch.dtype = torch.float64) -> tuple[nn.Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    head = nn.Linear(WIDTH, VOCAB, bias=False, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(VOCAB, WIDTH, generator=generator))
    hidden = torch.randn(BATCH, LENGTH, WIDTH, generator=generator).to(dtype).requires_grad_()
    return head, hidden, torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)


def with_gradients(chunk_tokens: int, z_loss: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    head, hidden, targets = problem(dtype)
    loss = token_loss(head, hidden, targets, chunk_tokens=chunk_tokens, z_loss=z_loss)
    loss.backward()
    assert hidden.grad is not None
    assert head.weight.grad is not None
    return loss.detach(), hidden.grad, head.weight.grad


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 20, 59])  # of 60
def test_chunks_change_the_order_of_sums_alone(chunk_tokens: int, z_loss: float) -> None:
    for whole, parts in zip(
        with_gradients(0, z_loss, torch.float64),
        with_gradients(chunk_tokens, z_loss, torch.float64),
        strict=True,
    ):
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("chunk_tokens", [COUNT, COUNT + 1])
def test_one_chunk_has_the_same_bits(chunk_tokens: int) -> None:
    for whole, parts in zip(
        with_gradients(0, 1e-2, torch.float32), with_gradients(chunk_tokens, 1e-2, torch.float32), strict=True
    ):
        assert torch.equal(whole, parts)


@pytest.mark.parametrize("chunk_tokens", [0, 13])
def test_z_loss_is_its_formula_token_by_token(chunk_tokens: int) -> None:
    head, hidden, targets = problem()
    z_loss, total = 1e-2, 0.0
    for h, target in zip(hidden.flatten(0, 1), targets.flatten().tolist(), strict=True):
        logits = (head.weight @ h).detach().tolist()
        log_z = math.log(math.fsum(math.exp(logit) for logit in logits))
        total += (log_z - logits[target]) + z_loss * log_z**2
    loss = token_loss(head, hidden, targets, chunk_tokens=chunk_tokens, z_loss=z_loss)
    assert loss.item() == pytest.approx(total / COUNT, rel=1e-12)
    plain = token_loss(head, hidden, targets, chunk_tokens=chunk_tokens)
    assert (loss - plain).item() > 0.01


def test_z_loss_has_the_gradient_of_its_formula() -> None:
    head, hidden, targets = problem()
    inputs = (hidden, head.weight)
    found = torch.autograd.grad(token_loss(head, hidden, targets, chunk_tokens=7, z_loss=0.1), inputs)
    logits = head(hidden).flatten(0, 1)
    log_z = logits.exp().sum(-1).log()
    expected = (log_z - logits[torch.arange(COUNT), targets.flatten()] + 0.1 * log_z**2).mean()
    for a, b in zip(found, torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("grad", [True, False], ids=["training", "evaluation"])
def test_never_all_logits_at_once(grad: bool) -> None:
    logits = 4 * COUNT * VOCAB
    seen = {}
    for chunk_tokens in (0, 6):
        head, hidden, targets = problem(torch.float32)
        with Alive() as alive, torch.set_grad_enabled(grad):
            loss = token_loss(head, hidden, targets, chunk_tokens=chunk_tokens)
            waiting = alive.bytes()
            if grad:
                loss.backward()
        seen[chunk_tokens] = (waiting, alive.largest, alive.peak)
    assert seen[0][1] == logits
    assert seen[6][1] < logits / 2  # the head's gradient is the largest
    assert seen[6][2] < seen[0][2] / 2
    assert seen[6][0] < logits / 50  # nothing of the vocabulary's size waits for the backward pass
    assert (seen[0][0] >= logits) == grad


def test_gradients_of_bf16_chunks_are_added_up_in_fp32() -> None:
    """Else each addition would round, and a thousand of them would leave two digits."""
    generator = torch.Generator().manual_seed(6)
    weight, hidden = torch.randn(8, 4, generator=generator), torch.randn(1, 4096, 4, generator=generator)
    targets = torch.randint(0, 8, (1, 4096), generator=generator)
    found = {}
    for chunk_tokens, autocast in ((0, False), (0, True), (4, True)):
        head = nn.Linear(4, 8, bias=False)
        with torch.no_grad():
            head.weight.copy_(weight)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = token_loss(head, hidden, targets, chunk_tokens=chunk_tokens)
        assert loss.dtype is torch.float32
        loss.backward()
        assert head.weight.grad is not None
        found[chunk_tokens, autocast] = head.weight.grad
    exact = found[0, False]
    whole, parts = (float((found[n, True] - exact).norm() / exact.norm()) for n in (0, 4))
    assert parts < 1.5 * whole


def llama(chunk: int, tied: bool) -> Llama:
    shape = LlamaConfig(
        vocab_size=61,
        dim=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        ffn_dim=48,
        max_seq_len=24,
        tie_embeddings=tied,
    )
    model = Llama(shape, loss_chunk_tokens=chunk)
    initialize(model, 3)
    return model.double()


@pytest.mark.parametrize("tied", [False, True])
def test_a_models_gradients_in_chunks(tied: bool) -> None:
    ids = torch.randint(0, 61, (2, 21), generator=torch.Generator().manual_seed(1))
    whole, parts = llama(0, tied), llama(9, tied)
    for model in (whole, parts):
        model.loss(ids[:, :-1], ids[:, 1:], z_loss=1e-3).backward()
    for (name, a), b in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-15, msg=name)


def test_the_head_is_called_as_a_module() -> None:
    model, calls = llama(9, False), []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    ids = torch.randint(0, 61, (2, 21), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.loss(ids[:, :-1], ids[:, 1:])
    assert len(calls) == 5  # 40 tokens


def test_training_has_the_z_loss_and_validation_has_not() -> None:
    keys = ["model.size=1m", "model.num_layers=1", "data.seq_len=16", "inner.batch_size=2"]
    ids = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(1))
    losses = {}
    for z_loss in ("0", "0.25"):
        config = load(None, [*keys, f"inner.z_loss={z_loss}"], {})
        model = build_model(config)
        before = validation_loss(model, ids)
        report = build_inner(model, config).step(ids[:, :-1], ids[:, 1:], 0)
        losses[z_loss] = before, report.loss
    assert losses["0"] == (losses["0.25"][0], pytest.approx(losses["0.25"][0], rel=1e-6))
    log_z = math.log(256)  # within a per cent, at the start
    assert losses["0.25"][1] - losses["0.25"][0] == pytest.approx(0.25 * log_z**2, rel=0.02)
