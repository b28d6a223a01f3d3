"""The built-in Llama against closed forms, invariances and, where installed, HF's own."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from atoll.train import init
from atoll.train.init import STD, initialize, initialize_parameter, start_values
from atoll.train.llama import Llama, LlamaConfig, rope_tables, rotate


def config(**changes: object) -> LlamaConfig:
    values = {
        "vocab_size": 61,
        "dim": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_dim": 48,
        "max_seq_len": 24,
    }
    return LlamaConfig(**{**values, **changes})  # type: ignore[arg-type]


def make(seed: int = 0, **changes: object) -> Llama:
    model = Llama(config(**changes))
    initialize(model, seed)
    return model


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_names_are_those_of_hf() -> None:
    names = set(make(num_layers=1).state_dict())
    layer = "model.layers.0."
    assert names == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        *(f"{layer}self_attn.{p}_proj.weight" for p in "qkvo"),
        *(f"{layer}mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
        f"{layer}input_layernorm.weight",
        f"{layer}post_attention_layernorm.weight",
    }


@pytest.mark.parametrize(("kv_heads", "tied"), [(1, False), (2, True), (4, False)])
def test_logits_equal_hf(kv_heads: int, tied: bool) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install transformers"
    )
    model = make(num_kv_heads=kv_heads, tie_embeddings=tied, rope_theta=5000.0)
    with torch.no_grad():
        for parameter in model.parameters():  # start weights are small: every part should matter
            parameter.mul_(5) if parameter.ndim > 1 else parameter.mul_(1.3)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(model.config.hf_config()))
    theirs.load_state_dict(model.state_dict(), strict=True)
    ids = tokens(2, 24)
    torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=0, atol=1e-5)


def test_a_tied_head_is_one_storage() -> None:
    tied = make(tie_embeddings=True)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert sum(p.numel() for p in tied.parameters()) == tied.config.num_parameters()
    assert tied.config.num_parameters() == make().config.num_parameters() - 61 * 32


def test_a_future_token_does_not_change_earlier_logits() -> None:
    model, ids = make(), tokens(2, 24)
    changed = ids.clone()
    changed[:, 13] = (changed[:, 13] + 1) % 61
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :13], after[:, :13])
    assert not torch.equal(before[:, 13:], after[:, 13:])


def test_grouped_heads_equal_full_heads_with_repeated_keys_and_values() -> None:
    grouped, full = make(num_kv_heads=2), make(num_kv_heads=4)
    weights = grouped.state_dict()
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            heads = weight.unflatten(0, (2, 8))
            weights[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    torch.testing.assert_close(grouped(tokens(2, 9)), full(tokens(2, 9)), rtol=1e-5, atol=1e-6)


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    cos, signed_sin = (table.double() for table in rope_tables(8, 40, 100.0))
    at = lambda x, position: rotate(x, cos[position], signed_sin[position])  # noqa: E731
    scores = [float(at(q, 7 + shift) @ at(k, 2 + shift)) for shift in (0, 1, 30)]
    np.testing.assert_allclose(scores, scores[0], rtol=1e-5)  # the tables are fp32
    assert abs(float(at(q, 7) @ at(k, 3)) - scores[0]) > 1e-3


def test_rotary_tables_are_neither_saved_nor_trained() -> None:
    model = make()
    assert not [name for name in model.state_dict() if "rope" in name]
    assert len(list(model.buffers())) == 2


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_made_on_meta_is_the_same_to_the_bit(tied: bool) -> None:
    plain, empty = make(tie_embeddings=tied), Llama.on_meta(config(tie_embeddings=tied))
    assert {tensor.device.type for tensor in (*empty.parameters(), *empty.buffers())} == {"meta"}
    empty.materialize("cpu")
    for tensor in empty.parameters():
        tensor.data.fill_(float("nan"))
    initialize(empty, 0)
    assert (empty.lm_head.weight is empty.model.embed_tokens.weight) == tied
    for (name, a), (other, b) in zip(
        [*plain.named_parameters(), *plain.named_buffers()],
        [*empty.named_parameters(), *empty.named_buffers()],
        strict=True,
    ):
        assert name == other
        assert torch.equal(a, b), name
    assert torch.equal(plain(tokens(2, 24)), empty(tokens(2, 24)))


def test_rotary_tables_are_the_cpus_whatever_the_default_device() -> None:
    with torch.device("meta"):
        cos, _ = rope_tables(8, 4, 100.0)
    assert torch.equal(cos, rope_tables(8, 4, 100.0)[0])


def test_loss_is_the_mean_of_minus_log_probability() -> None:
    model, ids, targets = make().double(), tokens(3, 7), tokens(3, 7, seed=9)
    log_probabilities = model(ids).log_softmax(-1)
    expected = -log_probabilities.gather(-1, targets.unsqueeze(-1)).mean()
    torch.testing.assert_close(model.loss(ids, targets), expected, rtol=1e-12, atol=0)


def test_bf16_weights_give_an_fp32_loss() -> None:
    loss = make().bfloat16().loss(tokens(1, 4), tokens(1, 4))
    assert loss.dtype is torch.float32
    assert torch.isfinite(loss)


def test_a_too_long_sequence_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"25 tokens .* max_seq_len = 24"):
        make()(tokens(1, 25))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 30}, "dim = 30 is not a multiple of num_heads = 4"),
        ({"dim": 12}, "must be even"),
        ({"num_kv_heads": 3}, "num_heads = 4 is not a multiple of num_kv_heads = 3"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_start_weights_are_these_bits_for_ever() -> None:
    """Golden values: if they change, peers of two releases refuse each other's start state."""
    values = start_values("model.norm.weight", 4, seed=7, std=0.02)
    assert values.dtype == np.float32
    assert [value.hex() for value in values.tolist()] == [
        "0x1.836cd40000000p-12",
        "-0x1.aacb6e0000000p-7",
        "0x1.b3c8b40000000p-8",
        "0x1.9bcb8a0000000p-7",
    ]


def test_start_weights_depend_on_seed_and_name_only() -> None:
    before = {name: p.clone() for name, p in make(seed=5).named_parameters()}
    threads, default = torch.get_num_threads(), torch.random.get_rng_state()
    torch.manual_seed(999)
    torch.set_num_threads(1)
    try:
        torch.rand(17)  # others draw random numbers in between
        again = Llama(config())
        for parameter in reversed(list(again.parameters())):
            parameter.data.fill_(float("nan"))
        initialize(again, 5)
    finally:
        torch.set_num_threads(threads)
        torch.random.set_rng_state(default)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_start_weights_are_the_same_from_another_thread_and_in_a_deeper_model() -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    made: list[Llama] = []
    worker = threading.Thread(target=lambda: made.append(make(num_layers=5)))
    worker.start()
    worker.join(30)
    assert torch.equal(made[0].get_parameter(name), make().get_parameter(name))
    assert not torch.equal(make(seed=1).get_parameter(name), make().get_parameter(name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_parameter_at_a_time_and_rows_of_one(dtype: torch.dtype) -> None:
    model = make(seed=4).to(dtype)
    for name, parameter in model.named_parameters():
        whole = torch.full_like(parameter, float("nan"))
        initialize_parameter(name, whole, seed=4, num_layers=2)
        assert torch.equal(whole, parameter), name
        if parameter.ndim == 2:
            columns = parameter.shape[1]
            rows = torch.full_like(parameter[3:8], float("nan"))
            initialize_parameter(name, rows, seed=4, num_layers=2, first=3 * columns)
            assert torch.equal(rows, parameter[3:8]), name


def test_start_values_begin_anywhere() -> None:
    whole = start_values("w", (1 << 20) + 50, seed=0, std=1.0)
    for first in (1, 2, 3, 4, 5, 7, 1000, (1 << 20) - 3, 1 << 20, (1 << 20) + 1):
        assert np.array_equal(start_values("w", 9, seed=0, std=1.0, first=first), whole[first : first + 9])


def test_a_parameter_larger_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "PIECE", 10)
    made = torch.empty(7, 9)
    initialize_parameter("w", made, seed=1, num_layers=1)
    assert np.array_equal(made.flatten().numpy(), start_values("w", 63, seed=1, std=STD))


def test_start_weights_of_a_large_parameter_begin_like_those_of_a_small_one() -> None:
    few, many = (start_values("w", n, seed=0, std=1.0) for n in (1000, (1 << 20) + 3))
    assert np.array_equal(few, many[:1000])
    assert len(np.unique(many[-100:])) > 90  # the second piece goes on with the stream


def test_start_weights_look_normal() -> None:
    values = start_values("w", 1 << 20, seed=3, std=0.02).astype(np.float64)
    assert abs(values.mean()) < 5 * 0.02 / 1024
    assert abs(values.std() / 0.02 - 1) < 5e-3
    assert abs(values).max() < 3.47 * 0.02
    assert 0.66 < (abs(values) < 0.02).mean() < 0.69
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5e-3


def test_standard_deviations_by_kind_of_parameter() -> None:
    model = make(dim=128, num_layers=8)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            expected = STD / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else STD
            assert abs(float(parameter.detach().std()) / expected - 1) < 0.05, name
