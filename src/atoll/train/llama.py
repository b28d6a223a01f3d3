"""The built-in model: a Llama whose parameter names and weights map one to one to HF `LlamaForCausalLM`.

RMSNorm, rotary positions (the `rotate_half` convention), grouped-query attention, SwiGLU, output head tied to
the embedding or not. Plain modules and no masks: what SDPA, FSDP and `torch.compile` handle best.
Shapes: B sequences, T tokens, H heads, K key-value heads, C = dim / H channels, V = vocab_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.train.cross_entropy import token_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The shape of a Llama. Raises ValueError if heads, channels and key-value heads do not fit together."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    max_seq_len: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.dim % self.num_heads:
            raise ValueError(f"dim = {self.dim} is not a multiple of num_heads = {self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"dim / num_heads = {self.head_dim} must be even for rotary positions")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    def num_parameters(self) -> int:
        """Trainable elements; a tied head counts once."""
        attention = 2 * self.dim * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        embeddings = (1 if self.tie_embeddings else 2) * self.vocab_size * self.dim
        return embeddings + self.num_layers * layer + self.dim

    def hf_config(self) -> dict[str, Any]:
        """The `config.json` with which `transformers` loads this model's weights."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn_dim,
            "max_position_embeddings": self.max_seq_len,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": "float32",
        }


def rope_tables(head_dim: int, length: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each [length, head_dim]; the sines signed for `rotate`.

    On the CPU, whatever torch's default device is: other devices round differently.
    """
    cpu = {"dtype": torch.float32, "device": "cpu"}
    frequencies = theta ** -(torch.arange(0, head_dim, 2, **cpu) / head_dim)
    angles = torch.outer(torch.arange(length, **cpu), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Turn channel pairs `(i, i + C/2)` of `x` [..., T, C] by their position's angle, in fp32 or wider."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((second, first), dim=-1) * signed_sin).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal self-attention; each key-value head serves `H / K` neighbouring query heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.group = config.num_heads // config.num_kv_heads
        self.q_proj = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        q, k, v = (  # [B, H or K, T, C]
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, signed_sin), rotate(k, cos, signed_sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.group > 1)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, signed_sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Everything below the output head (`model.` in the names)."""

    rope_cos: Tensor
    rope_signed_sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.config = config
        # Not persistent: a function of the config, so it is neither saved nor sent.
        for name in ("rope_cos", "rope_signed_sin"):
            self.register_buffer(name, torch.empty(config.max_seq_len, config.head_dim), persistent=False)
        self.fill_rope()

    @torch.no_grad()
    def fill_rope(self) -> None:
        """Set the rotary tables, to the same bits on every device; on the meta device there is nothing to set."""
        if self.rope_cos.is_meta:
            return
        config = self.config
        cos, signed_sin = rope_tables(config.head_dim, config.max_seq_len, config.rope_theta)
        self.rope_cos.copy_(cos)
        self.rope_signed_sin.copy_(signed_sin)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        length = input_ids.shape[1]
        cos, signed_sin = self.rope_cos[:length], self.rope_signed_sin[:length]
        for layer in self.layers:
            x = layer(x, cos, signed_sin)
        return self.norm(x)


class Llama(nn.Module):
    """A decoder-only language model. Its weights are torch's own until `train.init.initialize` sets them.

    `loss_chunk_tokens`: the loss makes logits of so many tokens at once, 0 for all.
    """

    def __init__(self, config: LlamaConfig, *, loss_chunk_tokens: int = 0) -> None:
        super().__init__()
        self.config = config
        self.loss_chunk_tokens = loss_chunk_tokens
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie()

    @classmethod
    def on_meta(cls, config: LlamaConfig, *, loss_chunk_tokens: int = 0) -> Llama:
        """A model without memory: at once, whatever its size. `materialize` gives it memory."""
        with torch.device("meta"):
            return cls(config, loss_chunk_tokens=loss_chunk_tokens)

    def tie(self) -> None:
        """Where the head is tied, make it the embedding again: `nn.Module.to_empty` gives each its own memory."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def materialize(self, device: torch.device | str) -> None:
        """Memory on `device` for a model that was made on the meta device. Its parameters have yet to be set."""
        self.to_empty(device=device)
        self.tie()
        self.model.fill_rope()

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [B, T, V] of the token after each position of `input_ids` [B, T], T up to `max_seq_len`."""
        return self.lm_head(self._hidden(input_ids))

    def loss(self, input_ids: Tensor, targets: Tensor, *, z_loss: float = 0.0) -> Tensor:
        """Mean cross-entropy in nats per token, a scalar; computed in fp32 (or wider, if the weights are).

        With `z_loss` times the mean square of the logits' logsumexp added.
        """
        return token_loss(
            self.lm_head,
            self._hidden(input_ids),
            targets,
            chunk_tokens=self.loss_chunk_tokens,
            z_loss=z_loss,
        )

    def _hidden(self, input_ids: Tensor) -> Tensor:
        length, limit = input_ids.shape[1], self.config.max_seq_len
        if length > limit:
            raise ValueError(f"a sequence of {length} tokens is longer than max_seq_len = {limit}")
        return self.model(input_ids)
