"""Models of `transformers`: start weights with equal bits, names and losses as theirs, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.config.load import load
from atoll.errors import ConfigError
from atoll.state.tensors import ModelTensors
from atoll.train.build import load_corpus
from atoll.train.causal import config_digest, names_elsewhere, open_causal_lm, plain_config, read_hub_config
from atoll.train.models import build_model
from atoll.train.muon import hidden_matrices
from support.hub import KINDS, write_config

transformers = pytest.importorskip("transformers", reason="needs: pip install 'atoll-train[hf]'")


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


@pytest.fixture(params=KINDS)
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_config(request.param, tmp_path)


def test_start_weights_follow_from_the_runs_seed_alone(config: Path) -> None:
    torch.manual_seed(1)
    one = open_causal_lm(config, seed=5)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    two = open_causal_lm(config, seed=5)
    assert torch.equal(torch.get_rng_state(), state), "what training draws is not used up"
    other = open_causal_lm(config, seed=6)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(config))
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, two.get_parameter(name)), name
        own = theirs.get_parameter(name)
        if own.unique().numel() == 1:
            assert torch.equal(parameter, own), f"{name} starts as a constant there"
        else:
            assert not torch.equal(parameter, other.get_parameter(name)), name
            assert not torch.equal(parameter, own), name
            assert parameter.std().item() == pytest.approx(own.std().item(), rel=0.6), name
    assert one.loss(*batch()).item() == pytest.approx(torch.tensor(256.0).log().item(), rel=0.05)


def test_names_and_loss_are_theirs(config: Path) -> None:
    ours = open_causal_lm(config, seed=5).eval()
    theirs = transformers.AutoModelForCausalLM.from_config(ours.config).eval()
    theirs.load_state_dict(ours.state_dict())
    named = (dict(each.named_parameters(remove_duplicate=False)) for each in (ours, theirs))
    assert list(next(named)) == list(next(named))
    inputs, targets = batch()
    whole = torch.cat((inputs, targets[:, -1:]), dim=1)
    wanted = theirs(input_ids=whole, labels=whole).loss
    assert ours.loss(inputs, targets).item() == pytest.approx(wanted.item(), rel=1e-6)
    ours.loss(inputs, targets).backward()
    assert all(each.grad is not None for each in ours.parameters())


def test_a_saved_folder_is_opened_to_the_bit(config: Path, tmp_path: Path) -> None:
    ours = open_causal_lm(config, seed=5)
    theirs = transformers.AutoModelForCausalLM.from_config(ours.config)
    theirs.load_state_dict(ours.state_dict())
    theirs.save_pretrained(tmp_path / "saved")
    again = open_causal_lm(tmp_path / "saved", seed=99)
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
    assert config_digest(read_hub_config(tmp_path / "saved")) == config_digest(read_hub_config(config))
    tensors = ModelTensors(again.named_parameters(remove_duplicate=False))
    assert tensors.layout.numel == sum(each.numel() for each in again.parameters())


@pytest.mark.parametrize(("kind", "tie"), [("gpt2", "transformer.wte.weight"), ("qwen2", None)])
def test_tied_weights_are_saved_under_their_first_name(tmp_path: Path, kind: str, tie: str | None) -> None:
    model = open_causal_lm(write_config(kind, tmp_path), seed=5)
    assert names_elsewhere(model) == ({"lm_head.weight": tie} if tie else {})


def test_muon_leaves_embeddings_and_head_alone(config: Path) -> None:
    model = open_causal_lm(config, seed=5)
    names = {id(each): name for name, each in model.named_parameters()}
    chosen = [names[id(each)] for each in hidden_matrices(model)]
    assert len(chosen) >= 8
    assert not any("wte" in name or "wpe" in name or "embed" in name or "head" in name for name in chosen)


def test_peers_compare_what_shapes_do_not_tell(tmp_path: Path) -> None:
    one = config_digest(read_hub_config(write_config("qwen2", tmp_path)))
    changed = write_config("qwen2", tmp_path, rms_norm_eps=1e-3)
    assert config_digest(read_hub_config(changed)) != one
    said = json.loads(changed.read_text()) | {
        "rms_norm_eps": 1e-6,
        "transformers_version": "9",
        "dtype": "float16",
    }
    changed.write_text(json.dumps(said))
    assert config_digest(read_hub_config(changed)) == one


def test_bf16_weights_compute_without_autocast(config: Path) -> None:
    from atoll.train.masters import Masters

    model = open_causal_lm(config, seed=5).eval()
    exact = model.loss(*batch()).item()
    masters = Masters(model)
    loss = model.loss(*batch())
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(exact, rel=1e-2)
    loss.backward()
    masters.collect()
    assert all(masters.of(each).grad is not None for each in model.parameters())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}, "names code of its own"),
        ({"text_config": {"auto_map": {"AutoConfig": "a.B"}}}, "names code of its own"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantized"),
        ({"model_type": "vit"}, "'vit', which is no causal language model"),
        ({"model_type": None}, "None, which is no causal language model"),
        ({"model_type": "mamba"}, "starts at random and is no matrix"),
    ],
)
def test_what_atoll_does_not_train_is_refused_in_a_line(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = write_config("qwen2", tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=said) as caught:
        open_causal_lm(path, seed=0)
    assert "\n" not in str(caught.value)


def test_weights_that_are_no_safetensors_are_refused(tmp_path: Path) -> None:
    path = write_config("qwen2", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(ConfigError, match=r"has no model.safetensors, and only safetensors are taken"):
        open_causal_lm(path.parent, seed=0)


@pytest.mark.parametrize("what", ["missing", "surplus", "shape", "nan"])
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path, what: str) -> None:
    from safetensors.torch import save_file

    path = write_config("qwen2", tmp_path)
    weights = {name: each.detach().clone() for name, each in open_causal_lm(path, seed=0).named_parameters()}
    name = "model.layers.1.mlp.up_proj.weight"
    if what == "missing":
        del weights[name]
    elif what == "surplus":
        name = "model.layers.7.mlp.up_proj.weight"
        weights[name] = torch.zeros(3)
    elif what == "shape":
        weights[name] = torch.zeros(3, 3)
    else:
        weights[name][0, 0] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")) as caught:
        open_causal_lm(tmp_path, seed=0)
    assert "\n" not in str(caught.value)


def test_the_trainer_builds_it_and_takes_its_sizes(tmp_path: Path) -> None:
    path = write_config("gpt2", tmp_path)
    settings = [f"model.hf={path}", "data.seq_len=64"]
    assert plain_config(build_model(load(None, settings, {})))["architectures"] == ["GPT2LMHeadModel"]
    with pytest.raises(ConfigError, match=r"data\.seq_len = 65 is above the 64 tokens"):
        build_model(load(None, [*settings, "data.seq_len=65"], {}))
    with pytest.raises(ConfigError, match="dim = 64 is of the built-in Llama"):
        load(None, [*settings, "model.dim=64"], {})
    write_config("gpt2", tmp_path, vocab_size=100)
    with pytest.raises(ConfigError, match="100"):
        load_corpus(load(None, settings, {}))
