"""A run of a model of `transformers`, from its config to a folder that `transformers` opens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.cli.main import run
from atoll.events import RoundApplied
from atoll.train.causal import open_causal_lm
from atoll.train.lora import add_adapters
from support.hub import KINDS, write_config
from support.trainer import train

transformers = pytest.importorskip("transformers", reason="needs: pip install 'atoll-train[hf]'")

IDS = torch.arange(32).view(1, 32)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def exported(tmp_path: Path, *more: str) -> Path:
    out = tmp_path / "exported"
    assert run(["checkpoints", "export", str(tmp_path / "a" / "run"), "--out", str(out), *more]) == 0
    return out


@pytest.mark.parametrize("kind", [*KINDS, "mixtral", "gpt_neox"])
def test_it_is_trained_and_exported_with_equal_logits(tmp_path: Path, kind: str) -> None:
    config = write_config(kind, tmp_path)
    events = train(tmp_path, {"model.hf": config, "inner.optimizer": "muon"}, ("a", "b"))
    digests = [[e.digest for e in events[peer] if isinstance(e, RoundApplied)] for peer in ("a", "b")]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 3

    start = open_causal_lm(config, seed=0)
    before = logits(start)
    start.load_state_dict(load_file(tmp_path / "a" / "run" / "model.safetensors"), strict=False)
    start.tie_weights()
    out = exported(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert torch.equal(logits(theirs), logits(start))
    assert (logits(start) - before).abs().max() > 1e-2
    assert type(theirs).__name__ == type(start).__name__
    again = open_causal_lm(out, seed=1)
    assert torch.equal(logits(again), logits(start)), "it can be the start of another run"


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("gpt2", ("c_attn", "c_proj", "c_fc")), ("gemma3_text", ("q_proj", "v_proj", "down_proj"))],
)
def test_adapters_over_its_weights_are_merged(
    tmp_path: Path, kind: str, targets: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(kind, tmp_path)
    base = tmp_path / "base"
    plain = open_causal_lm(config, seed=5)
    theirs = transformers.AutoModelForCausalLM.from_config(plain.config)
    theirs.load_state_dict(plain.state_dict())
    theirs.save_pretrained(base)

    named = ", ".join(f'"{each}"' for each in targets)
    train(tmp_path, {"model.hf": base, "model.lora_rank": 2, "model.lora_targets": f"[{named}]"})
    final = load_file(tmp_path / "a" / "run" / "model.safetensors")
    assert all(name.endswith((".lora_a", ".lora_b")) for name in final)
    model = open_causal_lm(base, seed=5)
    before = logits(model)
    add_adapters(model, rank=2, alpha=16.0, targets=targets, seed=0)
    assert torch.equal(logits(model), before)
    assert not model.load_state_dict(final, strict=False).unexpected_keys
    merged = transformers.AutoModelForCausalLM.from_pretrained(exported(tmp_path), dtype=torch.float32)
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-5)
    assert (logits(merged) - before).abs().max() > 1e-3
