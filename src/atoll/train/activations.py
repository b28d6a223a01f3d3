"""Less memory for activations: layers that are computed again in the backward pass (Chen et al. 2016).

What is computed again is computed by the same operations from the same inputs, so the gradients have the same bits.
*Selective* keeps what is dear to compute, matrix products and attention, and computes the cheap rest again: norms,
rotations, activations, casts (Korthikanti et al. 2022 and torch's `create_selective_checkpoint_contexts`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from atoll.errors import ConfigError

Mode = Literal["none", "selective", "full"]

# Matrix products and the forms that attention takes on the devices.
_DEAR = (
    "linear",
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math_for_mps",
)


def checkpoint_activations(model: nn.Module, mode: Mode, every: int = 1) -> int:
    """Have every `every`-th block of `model` compute its activations again; returns how many blocks do so.

    The blocks are those of its one list of modules of one class. Names of parameters and modules stay as they are.
    To be called once, before `fully_shard` and `torch.compile`. Raises ConfigError if there is no such list, or if it
    is shorter than `every`.
    """
    if mode == "none":
        return 0
    found = blocks(model)
    chosen = found[every - 1 :: every]
    if not chosen:
        raise ConfigError(
            f"local.checkpoint_every = {every} is above the model's {len(found)} layers: nothing would be computed "
            "again; lower it"
        )
    for block in chosen:
        # Not a wrapper, which would change names; not a closure, which a copy of the model would share with it.
        block.forward = partial(_again, block.forward, mode)
    return len(chosen)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of `model`: the elements of its one outermost ModuleList whose elements share a class."""
    lists: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1 and not inside:
            lists[name] = list(module)
    if len(lists) != 1:
        said = f"has {len(lists)}: {', '.join(lists)}" if lists else "has none"
        raise ConfigError(
            "activation checkpointing needs a model with one list of layers of one class; "
            f'{type(model).__name__} {said}; set local.activation_checkpointing = "none"'
        )
    return next(iter(lists.values()))


def _again(forward: Callable[..., Any], mode: Mode, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if mode == "full":
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=_contexts, **kwargs)


def _contexts() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_policy)


def _policy(_context: object, operation: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _dear() else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _dear() -> frozenset[object]:
    """Those of the operations that this torch has."""
    aten = torch.ops.aten
    return frozenset(getattr(aten, name).default for name in _DEAR if hasattr(aten, name))
