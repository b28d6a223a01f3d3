"""The inner optimizer: AdamW that decays matrices only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

FUSED_DEVICES = ("cpu", "cuda", "mps")


def make_adamw(
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    apart: Sequence[nn.Parameter] = (),
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters of `model`; fused where torch has it for all their devices.

    Those `apart` are left to another optimizer. A parameter without a gradient is left alone: no step, and no decay
    either.
    """
    others = {id(parameter) for parameter in apart}
    decayed, plain = ([each for each in group if id(each) not in others] for group in decay_groups(model))
    devices = {parameter.device.type for parameter in (*decayed, *plain)}
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    fused = devices.issubset(FUSED_DEVICES)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=lr, betas=betas, eps=eps, fused=fused
    )


def decay_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trainable parameters with and without weight decay, each storage once.

    Decayed are matrices, except embeddings: it would shrink the rows of rare tokens, which get few gradients.
    A head tied to the embedding is the embedding; vectors and scalars (norms, biases) are never decayed.
    """
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for parameter in module.parameters(recurse=False)
    }
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim >= 2 and id(parameter) not in embeddings
            (decayed if is_matrix else plain).append(parameter)
    return decayed, plain
