"""Validation loss, text samples and the speed meter."""

from __future__ import annotations

import math

import pytest
import torch

from atoll.train.evaluate import evaluating, validation_loss
from atoll.train.init import initialize
from atoll.train.llama import Llama, LlamaConfig
from atoll.train.metrics import ThroughputMeter
from atoll.train.sample import sample_text, sample_tokens


@pytest.fixture
def model() -> Llama:
    shape = LlamaConfig(
        vocab_size=50, dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=24, max_seq_len=12
    )
    model = Llama(shape)
    initialize(model, 0)
    return model


def sequences(count: int) -> torch.Tensor:
    return torch.randint(0, 50, (count, 9), generator=torch.Generator().manual_seed(2))


def test_validation_loss_is_nats_per_token_whatever_the_micro_batch(model: Llama) -> None:
    model.double()
    data = sequences(7)
    expected = -model(data[:, :-1]).log_softmax(-1).gather(-1, data[:, 1:, None]).mean().item()
    for micro_batch in (0, 1, 3, 7, 100):
        assert validation_loss(model, data, micro_batch=micro_batch) == pytest.approx(expected, rel=1e-12)


def test_an_untrained_model_knows_nothing(model: Llama) -> None:
    assert validation_loss(model, sequences(8)) == pytest.approx(math.log(50), rel=0.01)


def test_validation_changes_neither_weights_nor_gradients_nor_modes(model: Llama) -> None:
    model.train()
    model.model.layers[0].eval()
    before = [p.detach().clone() for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    validation_loss(model, sequences(2))
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None and torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_modes_come_back_after_an_error(model: Llama) -> None:
    def fails() -> None:
        with evaluating(model):
            assert not model.training
            assert not torch.is_grad_enabled()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fails()
    assert model.training
    assert torch.is_grad_enabled()


def test_nothing_to_evaluate_is_an_error(model: Llama) -> None:
    with pytest.raises(ValueError, match="no sequences"):
        validation_loss(model, sequences(0))


def test_samples_repeat_by_seed_and_go_beyond_the_window(model: Llama) -> None:
    first, again, other = (sample_tokens(model, [1, 2], max_new_tokens=30, seed=s) for s in (4, 4, 5))
    assert first == again != other
    assert len(first) == 30
    assert all(0 <= token < 50 for token in first)
    assert model.training


def test_temperature_zero_takes_the_likeliest(model: Llama) -> None:
    prompt = [3, 4, 5]
    expected = int(model(torch.tensor([prompt]))[0, -1].argmax())
    assert sample_tokens(model, prompt, max_new_tokens=1, temperature=0) == [expected]


def test_sample_text_is_prompt_and_continuation(model: Llama) -> None:
    text = sample_text(model, [1, 2], lambda ids: ",".join(map(str, ids)), max_new_tokens=3, temperature=0)
    assert text.startswith("1,2,")
    assert len(text.split(",")) == 5
    with pytest.raises(ValueError, match="prompt is empty"):
        sample_text(model, [], str)


def test_throughput_is_over_the_window() -> None:
    meter = ThroughputMeter(window_s=10.0)
    assert meter.tokens_per_s() == 0
    meter.start(100.0)
    assert meter.tokens_per_s() == 0
    meter.add(50, 101.0)
    assert meter.tokens_per_s() == pytest.approx(50)
    for second in range(102, 130):
        meter.add(200, float(second))
    assert meter.tokens_per_s() == pytest.approx(200)
    meter.add(200, 229.0)  # a step longer than the window, with a wait in it
    assert meter.tokens_per_s() == pytest.approx(2)
