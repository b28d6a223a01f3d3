"""Validation loss of whatever weights a model holds."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from atoll.state.ownership import rows_of
from atoll.train.autocast import autocast_context
from atoll.train.model import LanguageModel
from atoll.train.ranks import ALONE, Ranks

EVAL_MICRO_BATCH = 16
"""Held-out sequences at once: they need no memory but for one layer's results, and the logits."""


@contextmanager
def evaluating(model: LanguageModel) -> Generator[None]:
    """Evaluation mode and no gradients. Every module has its own mode again afterwards, whatever happens.

    What FSDP has gathered meanwhile is let go: without a backward pass it would stay, and be taken for the weights
    after those have changed.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.train(False)
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
            if isinstance(module, FSDPModule):
                module.reshard()


def validation_loss(
    model: LanguageModel,
    sequences: Tensor,
    *,
    micro_batch: int = 0,
    device: torch.device | str = "cpu",
    autocast: bool = False,
    ranks: Ranks = ALONE,
) -> float:
    """Mean loss in nats per token over `sequences` [N, T + 1] of token ids; each but the first is a target.

    `micro_batch` sequences at once, 0 for all: that changes memory and speed, not what is measured.
    Several ranks share the sequences, call this together, and all get the same value.
    """
    if not len(sequences):
        raise ValueError("there are no sequences to evaluate; give at least one")
    device = torch.device(device)
    sequences = sequences.to(device, torch.long)
    first, stop = rows_of(len(sequences), ranks.rank, ranks.count)
    most = rows_of(len(sequences), 0, ranks.count)[1]
    starts = range(first, first + most, micro_batch or most)
    parts = [sequences[start:stop][: micro_batch or most] for start in starts]
    with evaluating(model), autocast_context(device, autocast):
        # a rank with none left computes something all the same: what FSDP gathers, all gather together
        some = [part if len(part) else sequences[:1] for part in parts]
        losses = torch.stack([model.loss(part[:, :-1], part[:, 1:]) for part in some]).tolist()
    total = sum(loss * len(part) for loss, part in zip(losses, parts, strict=True) if len(part))
    if ranks.count > 1:
        total = float(ranks.mean(torch.tensor([total], dtype=torch.float64, device=device))) * ranks.count
    return total / len(sequences)
