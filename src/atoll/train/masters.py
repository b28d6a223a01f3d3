"""bf16 weights on the device, with fp32 masters.

The parameters that a model was built with become the *masters*: the optimizer steps on them, and Atoll reads and writes
them, so small steps add up (in bf16, 1 - 0.001 is 1) and a peer that computes in bf16 has the layout, the anchor and
the pseudo-gradients of one that does not. The model itself gets bf16 *copies*, which are the masters rounded whenever
those change. Gradients are added up in fp32. At a round's end the masters are the anchor: there is nothing to save.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Masters:
    """The masters of one model, on one rank. All calls are on the training thread."""

    def __init__(self, model: nn.Module) -> None:
        """Put bf16 copies in place of the fp32 parameters of `model` that are trained; round those that are frozen.

        Whoever holds the former parameters (an optimizer, a ModelTensors) holds the masters from now on.
        """
        copies: dict[int, nn.Parameter] = {}
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._masters: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if parameter.dtype is not torch.float32:
                    continue
                if not parameter.requires_grad:
                    parameter.data = parameter.data.bfloat16()
                    continue
                if id(parameter) not in copies:
                    copy = nn.Parameter(parameter.detach().bfloat16())
                    copies[id(parameter)] = copy
                    self._pairs.append((parameter, copy))
                    self._masters[id(copy)] = parameter
                setattr(module, name, copies[id(parameter)])

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The master of a copy; of anything else, itself."""
        return self._masters.get(id(parameter), parameter)

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of the copies to those of the masters, and drop the former."""
        for master, copy in self._pairs:
            if copy.grad is None:
                continue
            if master.grad is None:
                master.grad = copy.grad.float()
            else:
                master.grad.add_(copy.grad)
            copy.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the copies: something has changed them."""
        masters: list[Tensor] = [master for master, _ in self._pairs]
        copies: list[Tensor] = [copy for _, copy in self._pairs]
        torch._foreach_copy_(copies, masters)
