"""Small configs of models that `transformers` knows."""

from __future__ import annotations

import json
from pathlib import Path

_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_GPT2 = {
    "vocab_size": 256,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
KINDS = ("gpt2", "qwen2", "gemma3_text", "mistral")
"""Tied and Conv1D with learned positions; biases; norms that start at zero, a head dimension of its own; plain."""


def write_config(kind: str, folder: Path, **changes: object) -> Path:
    shape: dict[str, object] = dict(_GPT2 if kind == "gpt2" else _SHAPE)
    if kind == "gemma3_text":
        shape["head_dim"] = 8
    if kind == "mixtral":
        shape["num_local_experts"] = 4
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": kind, **shape, **changes}))
    return path
