"""Loss, gradient norm and clipping of a whole peer, whatever number of ranks its model lies on.

FSDP leaves on each rank its rows of a gradient that is averaged over the ranks already. What it does not take, as a
parameter without a dimension, has a gradient of each rank's own batch: that is averaged here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from atoll.state.own_rows import local_of
from atoll.train.ranks import Ranks


class Gradients:
    """Those of `parameters`, after a backward pass. On the training thread; collective with several ranks."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: Ranks) -> None:
        self._parameters = parameters
        self._ranks = ranks
        self._cut = [p for p in parameters if isinstance(p, DTensor)]
        self._whole = [p for p in parameters if not isinstance(p, DTensor) and p.requires_grad]
        self._norm: Tensor | None = None  # as torch clips by, where it sees all there is

    def measure(self, mean_loss: Tensor) -> tuple[float, float]:
        """The peer's loss and the norm of its gradient: the same numbers on every rank. Reads from the device once."""
        if self._ranks.count > 1:
            return self._measure_together(mean_loss)
        norm = get_total_norm(self._cut_gradients() + self._whole_gradients())
        self._norm = norm if not self._cut else None
        loss, grad_norm = torch.stack((mean_loss, norm.to(mean_loss.device))).tolist()
        return loss, grad_norm

    def clip(self, limit: float, grad_norm: float) -> None:
        """Scale all gradients so that their norm, `grad_norm` as measured, becomes `limit`."""
        if self._norm is not None:
            clip_grads_with_norm_(self._parameters, limit, self._norm)
        else:
            gradients = self._cut_gradients() + self._whole_gradients()
            torch._foreach_mul_(gradients, min(1.0, limit / (grad_norm + 1e-6)))

    @torch.no_grad()
    def _measure_together(self, mean_loss: Tensor) -> tuple[float, float]:
        """One collective, in fp64: squares of fp32 norms may be too large for fp32."""
        square = get_total_norm(self._cut_gradients()).double().square()
        # a rank without a gradient sends zeros, so that what is sent has one size
        whole = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._whole]
        numbers = [each.to(mean_loss.device, torch.double).flatten() for each in (mean_loss, square, *whole)]
        mean = self._ranks.mean(torch.cat(numbers))
        sizes = [1, 1, *(p.numel() for p in self._whole)]
        for parameter, gradient in zip(self._whole, mean.split(sizes)[2:], strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(gradient.view(parameter.shape))
        loss, mean_square, rest = torch.stack((mean[0], mean[1], mean[2:].square().sum())).tolist()
        return loss, (mean_square * self._ranks.count + rest) ** 0.5

    def _cut_gradients(self) -> list[Tensor]:
        return [local_of(p.grad) for p in self._cut if p.grad is not None]

    def _whole_gradients(self) -> list[Tensor]:
        return [p.grad for p in self._whole if p.grad is not None]
