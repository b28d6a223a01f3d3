"""The built-in Llama's shapes by name: what `model.size` fills into the keys of [model] that are not given.

The numbers of published models are those of their config.json. `max_seq_len` is what a model was trained on without
scaled rotary angles, which the built-in Llama has not.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

ModelSize = Literal[
    "1m",
    "10m",
    "150m",
    "1b",
    "10b",
    "70b",
    "smollm2-135m",
    "llama-2-7b",
    "llama-2-13b",
    "llama-2-70b",
    "llama-3-8b",
    "llama-3-70b",
    "llama-3.2-1b",
    "intellect-1",
    "",
]
"""Empty: no name; the keys say it all."""


def _shape(
    vocab_size: int,
    dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    ffn_dim: int,
    max_seq_len: int,
    rope_theta: float = 10000.0,
    tie_embeddings: bool = False,
) -> Mapping[str, int | float | bool]:
    """Read-only, by the names of [model]'s keys."""
    return MappingProxyType(
        {
            "vocab_size": vocab_size,
            "dim": dim,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "ffn_dim": ffn_dim,
            "max_seq_len": max_seq_len,
            "rope_theta": rope_theta,
            "norm_eps": 1e-5,
            "tie_embeddings": tie_embeddings,
        }
    )


_INTELLECT_1 = _shape(128256, 4096, 42, 32, 8, 14336, 8192, 500000.0)
_LLAMA_3_70B = _shape(128256, 8192, 80, 64, 8, 28672, 8192, 500000.0)

SIZES: Mapping[str, Mapping[str, int | float | bool]] = MappingProxyType(
    {
        "1m": _shape(256, 128, 5, 4, 2, 352, 128),
        "10m": _shape(256, 384, 6, 6, 2, 1024, 256),
        "150m": _shape(32768, 768, 16, 12, 4, 2048, 2048),
        "1b": _shape(32768, 2048, 18, 16, 8, 5632, 4096),
        "10b": _INTELLECT_1,
        "70b": _LLAMA_3_70B,
        "smollm2-135m": _shape(49152, 576, 30, 9, 3, 1536, 8192, 100000.0, True),
        "llama-2-7b": _shape(32000, 4096, 32, 32, 32, 11008, 4096),
        "llama-2-13b": _shape(32000, 5120, 40, 40, 40, 13824, 4096),
        "llama-2-70b": _shape(32000, 8192, 80, 64, 8, 28672, 4096),
        "llama-3-8b": _shape(128256, 4096, 32, 32, 8, 14336, 8192, 500000.0),
        "llama-3-70b": _LLAMA_3_70B,
        "llama-3.2-1b": _shape(128256, 2048, 16, 32, 8, 8192, 8192, 500000.0, True),
        "intellect-1": _INTELLECT_1,
    }
)
"""Shapes by name, in the order in which they are documented."""
