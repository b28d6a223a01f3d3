"""Low-rank adapters (LoRA, arXiv:2106.09685): of a frozen model only small matrices are trained, and only they travel.

A linear layer with weight W [out, in] computes W x + (alpha / rank) B A x, where A [rank, in] starts random and B
[out, rank] at zero, so that the model starts as it was. Merged, it is a plain layer again: W + (alpha / rank) B A.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.checkpoint.description import Adapted, Adapters
from atoll.checkpoint.merging import weight_digest
from atoll.errors import ConfigError
from atoll.train.init import start_values

_CONV1D = "Conv1D"
"""GPT-2's linear layer in `transformers`: its weight is [in, out]."""


class _Adapter(nn.Module):
    """What an adapted layer has besides its own: the class of such a layer is this and the layer's own class."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float
    lora_base: str
    """The digest of the layer's own weight, taken before that is cut among ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.lora_scale


@cache
def _adapted_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Adapted{kind.__name__}", (_Adapter, kind), {})


@torch.no_grad()
def add_adapters(model: nn.Module, *, rank: int, alpha: float, targets: Sequence[str], seed: int) -> None:
    """Freeze `model`, and give each of its linear layers whose last name is in `targets` an adapter.

    The names of what was there do not change; NAME.lora_a and NAME.lora_b come in. A is made of the run's `seed` and
    its name, to the bit the same on all peers (`train.init`). Raises ConfigError if there is nothing to adapt, or what
    is shared with another layer.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    layers = {name: module for name, module in model.named_modules() if _is_linear(module)}
    chosen = {name: each for name, each in layers.items() if name.rpartition(".")[2] in targets}
    missed = sorted(set(targets) - {name.rpartition(".")[2] for name in chosen})
    if missed:
        there = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
        raise ConfigError(
            f"model.lora_targets has {', '.join(missed)}, and no linear layer is named so; there are {there}"
        )
    owners = [id(each) for module in model.modules() for each in module.parameters(recurse=False)]
    for name, module in chosen.items():
        if owners.count(id(module.weight)) > 1:
            raise ConfigError(
                f"model.lora_targets: the weight of {name} is tied to another layer's; leave it out"
            )
        _adapt(name, module, rank, alpha / rank, seed)


def adapters_of(model: nn.Module, base: str) -> Adapters:
    """What is to be known of the adapters to merge them with the weights in the folder `base`."""
    adapted = {name: each for name, each in model.named_modules() if isinstance(each, _Adapter)}
    scale = next(iter(adapted.values())).lora_scale
    layers = {
        name: Adapted(digest=each.lora_base, transposed=_is_transposed(each))
        for name, each in adapted.items()
    }
    return Adapters(base=base, scale=scale, layers=layers)


def _adapt(name: str, module: nn.Module, rank: int, scale: float, seed: int) -> None:
    weight = module.get_parameter("weight")
    outs, ins = reversed(weight.shape) if _is_transposed(module) else weight.shape
    values = start_values(f"{name}.lora_a", rank * ins, seed=seed, std=1 / math.sqrt(ins))
    module.lora_a = nn.Parameter(torch.from_numpy(values).view(rank, ins).to(weight.device))
    module.lora_b = nn.Parameter(torch.zeros(outs, rank, device=weight.device))
    module.__class__ = _adapted_class(type(module))
    assert isinstance(module, _Adapter)
    module.lora_scale = scale
    module.lora_base = weight_digest(weight)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == _CONV1D


def _is_transposed(module: nn.Module) -> bool:
    return any(kind.__name__ == _CONV1D for kind in type(module).__mro__)
