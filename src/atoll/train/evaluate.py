"""Validation loss of whatever weights a model holds."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from atoll.train.autocast import autocast_context
from atoll.train.model import LanguageModel

EVAL_MICRO_BATCH = 16
"""Held-out sequences at once: they need no memory but for one layer's results, and the logits."""


@contextmanager
def evaluating(model: LanguageModel) -> Generator[None]:
    """Evaluation mode and no gradients. Every module has its own mode again afterwards, whatever happens."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(False)
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def validation_loss(
    model: LanguageModel,
    sequences: Tensor,
    *,
    micro_batch: int = 0,
    device: torch.device | str = "cpu",
    autocast: bool = False,
) -> float:
    """Mean loss in nats per token over `sequences` [N, T + 1] of token ids; each but the first is a target.

    `micro_batch` sequences at once, 0 for all: that changes memory and speed, not what is measured.
    """
    if not len(sequences):
        raise ValueError("there are no sequences to evaluate; give at least one")
    device = torch.device(device)
    parts = sequences.to(device, torch.long).split(micro_batch or len(sequences))
    with evaluating(model), autocast_context(device, autocast):
        losses = torch.stack([model.loss(part[:, :-1], part[:, 1:]) for part in parts]).tolist()
    return sum(loss * len(part) for loss, part in zip(losses, parts, strict=True)) / len(sequences)
