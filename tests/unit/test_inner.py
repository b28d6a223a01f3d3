"""The inner step against a bare PyTorch loop; accumulation, decay groups, and numbers that are not finite."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from atoll.errors import LocalError
from atoll.train.adamw import decay_groups, make_adamw
from atoll.train.autocast import bf16_available
from atoll.train.init import initialize
from atoll.train.inner import InnerStep
from atoll.train.llama import Llama, LlamaConfig
from atoll.train.lr_schedule import LRSchedule


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and wait for them where processors are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(tie_embeddings: bool = False) -> Llama:
    shape = LlamaConfig(
        vocab_size=40,
        dim=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        ffn_dim=24,
        max_seq_len=16,
        tie_embeddings=tie_embeddings,
    )
    model = Llama(shape)
    initialize(model, 1)
    return model


def batch(seed: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 40, (size, 11), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def adamw(model: nn.Module, weight_decay: float = 0.1) -> torch.optim.AdamW:
    return make_adamw(model, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=weight_decay)


def constant(_: int) -> float:
    return 1e-3


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("clip_norm", [0.0, 0.3, 1e9], ids=["never", "always", "loose"])
def test_equals_a_bare_pytorch_loop_to_the_bit(clip_norm: float) -> None:
    ours, bare = make(), make()
    schedule = LRSchedule(kind="cosine", peak_lr=3e-3, total_steps=8, warmup_steps=2)
    inner = InnerStep(ours, adamw(ours), schedule, clip_norm=clip_norm)
    optimizer = adamw(bare)
    for step in range(6):
        inputs, targets = batch(step)
        report = inner.step(inputs, targets, step)

        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        loss = bare.loss(inputs, targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(bare.parameters(), clip_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        assert (report.loss, report.lr, report.tokens) == (loss.item(), schedule(step), 80)
        assert report.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        assert report.clipped == (clip_norm == 0.3)
    assert same(weights(ours), weights(bare))


@pytest.mark.parametrize("micro_batch", [1, 3, 4, 7])
def test_accumulation_equals_the_whole_batch(micro_batch: int) -> None:
    whole, parts = make().double(), make().double()
    one = InnerStep(whole, adamw(whole), constant, clip_norm=0.5).step(*batch(0, 7), 0)
    many = InnerStep(parts, adamw(parts), constant, clip_norm=0.5, micro_batch=micro_batch).step(
        *batch(0, 7), 0
    )
    assert many.loss == pytest.approx(one.loss, rel=1e-12)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-12)
    for a, b in zip(weights(whole), weights(parts), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_the_learning_rate_comes_from_the_runs_step() -> None:
    model = make()
    inner = InnerStep(model, adamw(model), lambda step: 1e-3 * (step + 1))
    assert inner.step(*batch(0), 41).lr == pytest.approx(42e-3)  # a joiner's first step
    assert inner.step(*batch(0), 7).lr == pytest.approx(8e-3)
    assert {group["lr"] for group in inner.optimizer.param_groups} == {8e-3}


def test_training_lowers_the_loss() -> None:
    model = make()
    inner = InnerStep(model, adamw(model), lambda _: 1e-2, clip_norm=1.0)
    losses = [inner.step(*batch(0), step).loss for step in range(30)]
    assert losses[0] == pytest.approx(math.log(40), rel=0.02)
    assert losses[-1] < 0.8 * losses[0]


class Poisoned(nn.Module):
    """Gives its model's loss through `spoil`, but only at the chosen call."""

    def __init__(self, model: Llama, call: int, spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.call, self.calls, self.spoil = model, call, 0, spoil

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = self.model.loss(inputs, targets)
        return self.spoil(loss) if self.calls == self.call else loss


def bad_gradient(loss: torch.Tensor) -> torch.Tensor:
    """The loss itself stays finite; the square root's slope at zero is infinite."""
    return loss + (loss - loss.detach()).sqrt()


@pytest.mark.parametrize("micro_batch", [0, 2])
@pytest.mark.parametrize("spoil", [lambda x: x * math.nan, lambda x: x * math.inf, bad_gradient])
def test_a_step_that_is_not_finite_is_skipped_and_counted(
    spoil: Callable[[torch.Tensor], torch.Tensor], micro_batch: int
) -> None:
    calls_per_step = 4 if micro_batch else 1
    model = Poisoned(make(), calls_per_step + 1, spoil)
    inner = InnerStep(model, adamw(model), constant, clip_norm=1.0, micro_batch=micro_batch)
    assert not inner.step(*batch(0), 0).skipped
    before, state = weights(model), copy.deepcopy(inner.optimizer.state_dict()["state"])

    report = inner.step(*batch(1), 1)
    assert model.calls == 2 * calls_per_step  # the fault was there
    assert report.skipped
    assert not (math.isfinite(report.loss) and math.isfinite(report.grad_norm))
    assert not report.clipped
    assert same(before, weights(model))
    for index, values in inner.optimizer.state_dict()["state"].items():
        assert all(torch.equal(values[key], state[index][key]) for key in values)

    assert not inner.step(*batch(2), 2).skipped
    assert not same(before, weights(model))
    assert (inner.attempted_steps, inner.skipped_steps) == (3, 1)


@pytest.mark.parametrize("tied", [False, True])
def test_only_matrices_that_are_no_embeddings_decay(tied: bool) -> None:
    model = make(tie_embeddings=tied)
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, plain = ([names[id(p)] for p in group] for group in decay_groups(model))
    assert ("lm_head.weight" in decayed) == (not tied)
    assert "model.embed_tokens.weight" in plain
    assert all("norm" in name or "embed" in name for name in plain)
    assert len(decayed) == 2 * 7 + (not tied)
    assert sorted(decayed + plain) == sorted(names.values())  # each storage exactly once


def test_frozen_and_unused_parameters_are_left_alone() -> None:
    model = make()
    frozen = model.model.layers[0].get_parameter("mlp.up_proj.weight").requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(3, 3)))
    before = frozen.clone()
    inner = InnerStep(model, adamw(model, weight_decay=0.5), lambda _: 0.1, clip_norm=1.0)
    assert not inner.step(*batch(0), 0).skipped
    assert torch.equal(frozen, before)
    assert torch.equal(model.get_parameter("unused"), torch.ones(3, 3))


def test_bf16_autocast_trains_fp32_weights() -> None:
    device = torch.device("cpu")
    if not bf16_available(device):
        pytest.skip("this torch has no autocast on the CPU")
    plain, mixed = make(), make()
    exact = InnerStep(plain, adamw(plain), constant).step(*batch(0), 0)
    report = InnerStep(mixed, adamw(mixed), constant, autocast=True).step(*batch(0), 0)
    assert not report.skipped
    assert report.loss == pytest.approx(exact.loss, rel=1e-2)
    assert report.loss != exact.loss
    assert all(p.dtype is torch.float32 for p in mixed.parameters())


class Bigram(nn.Module):
    """The smallest language model there is: compiles fast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(40, 40)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.table(inputs).flatten(0, 1), targets.flatten())


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler"
)
def test_compiled_equals_plain_and_keeps_names() -> None:
    plain, fast = Bigram(), Bigram()
    expected = InnerStep(plain, adamw(plain), constant)
    inner = InnerStep(fast, adamw(fast), constant, compile=True)
    for step in range(2):
        loss = expected.step(*batch(step), step).loss
        assert inner.step(*batch(step), step).loss == pytest.approx(loss, rel=1e-5)
    assert [name for name, _ in fast.named_parameters()] == ["table.weight"]


def test_a_machine_that_cannot_compile_is_told_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import TorchDynamoException

    def no_compiler(_: object) -> Callable[..., torch.Tensor]:
        def call(*_: torch.Tensor) -> torch.Tensor:
            raise TorchDynamoException(
                "InvalidCxxCompiler: No working C++ compiler found\nand ten lines more"
            )

        return call

    monkeypatch.setattr(torch, "compile", no_compiler)
    model = Bigram()
    inner = InnerStep(model, adamw(model), constant, compile=True)
    with pytest.raises(LocalError, match=r"No working C\+\+ compiler found; set local.compile = false$"):
        inner.step(*batch(0), 0)
