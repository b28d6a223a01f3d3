"""What the built-in model consists of, by its config alone: names, shapes, what is trained of it and how it is grouped.

Not asked of a model on the meta device: that takes torch a second and a half to begin with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.state.layout import Layout
from atoll.train.llama import LlamaConfig
from atoll.train.muon import HEADS
from atoll.values import ParameterInfo

EMBEDDING = "embed_tokens"
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class Weights:
    """`trained` is what travels; `frozen` is what only lies there, under adapters."""

    trained: Layout
    frozen: Layout

    @property
    def numel(self) -> int:
        return self.trained.numel + self.frozen.numel

    def groups(self, *, trained: bool = False) -> list[int]:
        """The elements of what FSDP2 gathers as one: a layer each, and first the root's: embeddings, last norm, head.
        With `trained` those that get gradients."""
        sizes: dict[str, int] = {"": 0}
        for layout in (self.trained,) if trained else (self.trained, self.frozen):
            for each, size in zip(layout.parameters, layout.sizes, strict=True):
                _, found, rest = each.name.partition(".layers.")
                layer = rest.partition(".")[0] if found else ""
                sizes[layer] = sizes.get(layer, 0) + size
        return list(sizes.values())


def llama_layout(config: LlamaConfig) -> Layout:
    """Names and shapes as `ModelTensors` finds them in a `Llama`: tied weights once, by the first of their names."""
    dim, kv_dim = config.dim, config.num_kv_heads * config.head_dim
    of_layer = {
        "input_layernorm": (dim,),
        "post_attention_layernorm": (dim,),
        "self_attn.q_proj": (config.num_heads * config.head_dim, dim),
        "self_attn.k_proj": (kv_dim, dim),
        "self_attn.v_proj": (kv_dim, dim),
        "self_attn.o_proj": (dim, config.num_heads * config.head_dim),
        "mlp.gate_proj": (config.ffn_dim, dim),
        "mlp.up_proj": (config.ffn_dim, dim),
        "mlp.down_proj": (dim, config.ffn_dim),
    }
    shapes: dict[str, tuple[int, ...]] = {"lm_head": (config.vocab_size, dim), "model.norm": (dim,)}
    if not config.tie_embeddings:
        shapes[f"model.{EMBEDDING}"] = (config.vocab_size, dim)
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return _layout((f"{name}{_WEIGHT}", shape) for name, shape in shapes.items())


def llama_weights(config: LlamaConfig, *, lora_rank: int = 0, lora_targets: Sequence[str] = ()) -> Weights:
    """All weights, or with a `lora_rank` the adapters of `lora_targets` over weights that are frozen, as
    `train.lora.add_adapters` makes them. Raises ConfigError if no linear layer is named so."""
    whole = llama_layout(config)
    if not lora_rank:
        return Weights(whole, Layout(()))
    linear = {
        each.name.removesuffix(_WEIGHT): each.shape
        for each in whole.parameters
        if len(each.shape) == 2 and not each.name.endswith(EMBEDDING + _WEIGHT)
    }
    last_names = {name.rpartition(".")[2] for name in linear}
    if missed := sorted(set(lora_targets) - last_names):
        raise ConfigError(
            f"model.lora_targets has {', '.join(missed)}, and no linear layer is named so; there are "
            f"{', '.join(sorted(last_names))}"
        )
    adapters: list[tuple[str, tuple[int, ...]]] = []
    for name, (outs, ins) in linear.items():
        if name.rpartition(".")[2] in lora_targets:
            adapters += [(f"{name}.lora_a", (lora_rank, ins)), (f"{name}.lora_b", (outs, lora_rank))]
    return Weights(_layout(adapters), whole)


def hidden_matrices(layout: Layout) -> list[ParameterInfo]:
    """Those of the parameters that Muon takes (`train.muon.hidden_matrices`)."""
    apart = {EMBEDDING, *HEADS}
    return [p for p in layout.parameters if len(p.shape) == 2 and apart.isdisjoint(p.name.split("."))]


def _layout(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> Layout:
    return Layout.of([ParameterInfo(name=name, shape=shape, dtype="float32") for name, shape in shapes])
