"""A run that trains adapters, from start weights to an exported model: what goes over the wire, and what comes out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.cli.main import run
from atoll.events import RoundApplied
from atoll.plan.grid import Grid
from atoll.state.tensors import ModelTensors
from atoll.train.llama import Llama
from atoll.train.lora import add_adapters
from atoll.train.pretrained import load_weights, read_llama_config
from support.places import save, small_llama
from support.trainer import train

RANK, TARGETS = 2, ("q_proj", "v_proj")
FRAMES = 4096
"""Bytes of frame headers, acknowledgements and the like that a round of a few small chunks has at most."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Start weights in a folder, wide enough that they would show on the wire."""
    save(tmp_path / "place", small_llama(3), 1)
    assert run(["checkpoints", "export", str(tmp_path / "place"), "--out", str(tmp_path / "base")]) == 0
    return tmp_path / "base"


def settings(base: Path, **more: object) -> dict[str, object]:
    shape = read_llama_config(base)
    return {
        "model.init_from": base,
        **{f"model.{name}": getattr(shape, name) for name in ("dim", "num_layers", "num_heads")},
        "model.num_kv_heads": shape.num_kv_heads,
        "model.ffn_dim": shape.ffn_dim,
        "model.max_seq_len": shape.max_seq_len,
        "model.lora_rank": RANK,
        "model.lora_targets": '["q_proj", "v_proj"]',
        **more,
    }


def adapted(base: Path) -> Llama:
    model = Llama(read_llama_config(base))
    load_weights(model, base)
    add_adapters(model, rank=RANK, alpha=16.0, targets=TARGETS, seed=0)
    return model


@pytest.mark.parametrize(("a", "b"), [("fp32", "fp32"), ("bf16", "fp32")])
def test_adapters_are_trained_sent_and_merged(tmp_path: Path, base: Path, a: str, b: str) -> None:
    """Also where one peer computes in bf16, and has rounded what is frozen."""
    own = {"a": {"local.param_dtype": a}, "b": {"local.param_dtype": b}}
    events = train(tmp_path, settings(base), ("a", "b"), own)
    model = adapted(base)
    shape = model.config
    layers = shape.num_layers * RANK * ((shape.dim + shape.dim) + (shape.dim + shape.dim // 2))
    layout = ModelTensors(model.named_parameters(remove_duplicate=False)).layout
    wire_bytes = Grid.of(layout.sizes).wire_bytes("fp32")
    assert (layout.numel, wire_bytes) == (layers, 4 * layers)
    assert 4 * shape.num_parameters() > wire_bytes + 2 * FRAMES, "the whole model would be seen"
    for peer in ("a", "b"):
        rounds = [event for event in events[peer] if isinstance(event, RoundApplied)]
        assert len(rounds) == 3
        for event in rounds:  # half of the elements of each to the other, and half of the finished ones
            assert wire_bytes <= event.sent_bytes < wire_bytes + FRAMES

    digests = [[e.digest for e in each if isinstance(e, RoundApplied)] for each in events.values()]
    assert digests[0] == digests[1]
    final = load_file(tmp_path / "a" / "run" / "model.safetensors")
    assert final.keys() == {each.name for each in layout.parameters}
    out = tmp_path / "merged"
    assert run(["checkpoints", "export", str(tmp_path / "a" / "run"), "--out", str(out)]) == 0
    plain = Llama(read_llama_config(out))
    load_weights(plain, out)
    ids = torch.arange(32).view(1, 32)
    before = model(ids)
    model.load_state_dict(final, strict=False)
    torch.testing.assert_close(plain(ids), model(ids), rtol=1e-4, atol=1e-5)
    assert (plain(ids) - before).abs().max() > 1e-3, "training did something"


def test_a_base_that_moved_is_asked_for(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, settings(base))
    moved = base.rename(tmp_path / "moved")
    command = ["checkpoints", "export", str(tmp_path / "a" / "run"), "--out", str(tmp_path / "merged")]
    assert run(command) == 2
    assert "give --base with where they are" in capsys.readouterr().err
    assert run([*command, "--base", str(moved)]) == 0
