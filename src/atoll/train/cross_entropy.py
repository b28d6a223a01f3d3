"""The loss over the vocabulary, which for small models is most of the memory: N tokens times V logits in fp32.

In chunks of tokens, only one chunk's logits exist at a time: they are made again in the backward pass, which costs the
head's product once more. The z-loss of PaLM (Chowdhery et al. 2022, section 5) holds the scale of the logits: a
coefficient times the square of their logsumexp, log Z, draws it to zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]
"""From hidden states [..., C] to logits [..., V]. A module is called as one, so that hooks and wrappers see it."""


def token_loss(
    head: Head, hidden: Tensor, targets: Tensor, *, chunk_tokens: int = 0, z_loss: float = 0.0
) -> Tensor:
    """Mean over all tokens of `-log p(target) + z_loss (log Z)^2`, a scalar in nats, in fp32 or wider.

    `hidden` [B, T, C], `targets` [B, T] of token ids. `chunk_tokens`: logits of so many tokens at once, 0 for all; more
    than one chunk differs from one in the order of sums alone.
    """
    count = targets.numel()
    if not 0 < chunk_tokens < count:
        return _summed(head(hidden).flatten(0, 1), targets.flatten(), z_loss, "mean")
    chunks = zip(hidden.flatten(0, 1).split(chunk_tokens), targets.flatten().split(chunk_tokens), strict=True)
    with _casting_anew(hidden.device):
        sums = [_chunk(head, part, ids, z_loss) for part, ids in chunks]
    return torch.stack(sums).sum() / count


def _chunk(head: Head, hidden: Tensor, targets: Tensor, z_loss: float) -> Tensor:
    def summed(hidden: Tensor) -> Tensor:
        return _summed(head(hidden), targets, z_loss, "sum")

    if not torch.is_grad_enabled():
        return summed(hidden)
    # There is nothing random in it, and asking for the generator's state would wait for the device.
    return checkpoint(summed, hidden, use_reentrant=False, preserve_rng_state=False)


def _summed(logits: Tensor, targets: Tensor, z_loss: float, reduction: str) -> Tensor:
    """Over `logits` [N, V]; never over means of chunks, which would weigh a shorter last one too much."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    loss = F.cross_entropy(logits, targets, reduction=reduction)
    if z_loss:
        squares = logits.logsumexp(-1).square()
        loss = loss + z_loss * (squares.mean() if reduction == "mean" else squares.sum())
    return loss


def _casting_anew(device: torch.device) -> torch.autocast:
    """Autocast as it is, but without its cache: a bf16 head that chunks share would add up their gradients in bf16."""
    kind = device.type
    return torch.autocast(
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=False,
    )
