"""Adapters: what they compute, what of them travels, and that frozen weights are compared (hard case K13)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from atoll.checkpoint.merging import merged
from atoll.config.load import load
from atoll.errors import ConfigError
from atoll.state.tensors import ModelTensors
from atoll.train.adamw import make_adamw
from atoll.train.inner import InnerStep
from atoll.train.llama import Llama, LlamaConfig
from atoll.train.lora import adapters_of, add_adapters
from atoll.train.muon import hidden_matrices
from support.adapters import LowRank
from support.places import small_llama

RANK, ALPHA = 4, 8.0
TARGETS = ("q_proj", "v_proj", "down_proj")


def named(model: nn.Module) -> ModelTensors:
    return ModelTensors(model.named_parameters(remove_duplicate=False))


def adapted(seed: int = 7, targets: tuple[str, ...] = TARGETS, *, tied: bool = False) -> Llama:
    model = small_llama(3, tied=tied)
    add_adapters(model, rank=RANK, alpha=ALPHA, targets=targets, seed=seed)
    return model


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def trained(model: nn.Module, steps: int = 3) -> None:
    optimizer = make_adamw(model, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    inner = InnerStep(model, optimizer, lambda _: 1e-2)
    for step in range(steps):
        assert not inner.step(*batch(step), step).skipped


def test_a_model_with_fresh_adapters_computes_as_before_to_the_bit() -> None:
    model, plain = adapted(), small_llama(3)
    ids = batch()[0]
    assert torch.equal(model(ids), plain(ids))
    assert not set(dict(plain.named_parameters())) - set(dict(model.named_parameters())), "names stay"


def test_only_adapters_travel() -> None:
    """The formula: rank x (in + out) for each adapted layer."""
    model, plain = adapted(), small_llama(3)
    layers = [each for name, each in plain.named_modules() if name.rpartition(".")[2] in TARGETS]
    assert len(layers) == 2 * 3
    layout = named(model).layout
    assert layout.numel == sum(RANK * (each.in_features + each.out_features) for each in layers)
    assert all(each.name.endswith((".lora_a", ".lora_b")) for each in layout.parameters)
    frozen = {name: each.detach().clone() for name, each in plain.named_parameters()}
    trained(model)
    assert all(torch.equal(model.get_parameter(name), each) for name, each in frozen.items())
    assert not torch.equal(model(batch()[0]), plain(batch()[0]))


def test_start_values_follow_from_seed_and_name() -> None:
    torch.manual_seed(1)
    one = named(adapted()).read()
    torch.manual_seed(2)
    assert np.array_equal(named(adapted()).read(), one)
    assert not np.array_equal(named(adapted(seed=8)).read(), one)
    first = adapted().model.layers[0].self_attn.q_proj
    assert first.lora_a.std().item() == pytest.approx(16**-0.5, rel=0.3)
    assert not first.lora_b.any()


def test_the_base_is_compared_and_adapters_are_not_part_of_that() -> None:
    model, other = adapted(), adapted(seed=8)
    assert named(model).frozen_digest() == named(other).frozen_digest() != ""
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    assert named(model).frozen_digest() != named(other).frozen_digest()


@pytest.mark.parametrize("tied", [False, True])
def test_merged_weights_compute_what_the_adapted_model_did(tmp_path, tied: bool) -> None:  # type: ignore[no-untyped-def]
    from safetensors.torch import save_file

    model = adapted(tied=tied)
    base = {name: each.detach().clone() for name, each in small_llama(3, tied=tied).named_parameters()}
    save_file(base, tmp_path / "model.safetensors")
    trained(model)
    said = adapters_of(model, str(tmp_path))
    values = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    plain = small_llama(0, tied=tied)
    plain.load_state_dict(merged(said, values, tmp_path, torch.float32), strict=not tied)
    ids = batch()[0]
    torch.testing.assert_close(plain(ids), model(ids), rtol=1e-4, atol=1e-5)
    assert (plain(ids) - small_llama(3, tied=tied)(ids)).abs().max() > 1e-2, "the adapters do something"

    base["model.layers.0.self_attn.q_proj.weight"][0, 0] += 1e-3
    save_file(base, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"q_proj.weight is not what the adapters were trained over"):
        merged(said, values, tmp_path, torch.float32)


def test_a_target_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(
        ConfigError, match=r"has c_attn, and no linear layer is named so; there are down_proj, "
    ):
        adapted(targets=("q_proj", "c_attn"))
    with pytest.raises(ConfigError, match=r"the weight of lm_head is tied"):
        adapted(targets=("lm_head",), tied=True)


def test_muon_steps_on_adapters() -> None:
    assert len(hidden_matrices(adapted())) == 2 * 6


def test_adapters_need_weights_to_stand_on() -> None:
    with pytest.raises(
        ConfigError, match=r"lora_rank = 4 trains adapters over weights that stay as they are"
    ):
        load(None, ["model.lora_rank=4"], {})
    assert load(None, ["model.lora_rank=4", "model.init_from=/a"], {}).model.lora_rank == 4


def test_a_users_own_adapters_are_all_that_travels() -> None:
    torch.manual_seed(0)
    model, other = (
        Llama(
            LlamaConfig(
                vocab_size=40, dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=24, max_seq_len=16
            )
        )
        for _ in range(2)
    )
    other.load_state_dict(model.state_dict())
    digests = []
    for each in (model, other):
        each.requires_grad_(False)
        attention = each.model.layers[0].self_attn
        attention.q_proj, attention.v_proj = LowRank(attention.q_proj, 2), LowRank(attention.v_proj, 2)
        tensors = named(each)
        assert tensors.layout.numel == 2 * (16 + 16) + 2 * (16 + 8)
        digests.append(tensors.frozen_digest())
    assert digests[0] == digests[1], "their adapters differ, their base does not"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_pefts_adapters_are_all_that_travels() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = pytest.importorskip("transformers", reason="needs: pip install 'atoll-train[hf]'")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
    )
    digests = []
    for _ in range(2):
        torch.manual_seed(0)
        base = transformers.LlamaForCausalLM(config)
        torch.manual_seed(len(digests) + 1)
        lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
        model = peft.get_peft_model(base, lora)
        tensors = named(model)
        assert tensors.layout.numel == 2 * 2 * 4 * (16 + 16)
        assert all("lora_" in each.name for each in tensors.layout.parameters)
        digests.append(tensors.frozen_digest())
    assert digests[0] == digests[1]
    with torch.no_grad():
        next(each for each in base.parameters() if not each.requires_grad)[0, 0] += 1e-3
    assert named(model).frozen_digest() != digests[0]
