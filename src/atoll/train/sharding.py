"""A model on the ranks of its peer: FSDP2 (`fully_shard`) layer by layer, and the whole weights again at the end.

Training and evaluation call `model.loss`, not `forward`; what FSDP gathers and lets go around a forward pass it does
around the loss as well, so that a loss may use weights of its own, as that of an output head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a peer's ranks hold its model.

    `reshard_after_forward`: a layer's weights are let go after its forward pass and gathered again for the backward
    pass, which takes less memory and more traffic. `cpu_offload`: rows, gradients and optimizer state are in host
    memory. `param_dtype`: what is gathered and computed with, if not the parameters' own; gradients are averaged in
    fp32 then.
    """

    reshard_after_forward: bool = True
    cpu_offload: bool = False
    param_dtype: torch.dtype | None = None


def shard(model: nn.Module, mesh: DeviceMesh, how: Sharding = Sharding()) -> None:
    """Cut every parameter of `model` by rows over `mesh`: one group for each of its layers, one for the rest.

    In place; parameters become DTensors. Those without dimension or element, which FSDP does not take, stay whole on
    every rank (`train.gradients` averages their gradients). Collective.
    """
    apart = {p for p in model.parameters() if not p.ndim or not p.numel()}
    for parameter in apart:
        if not parameter.is_meta:
            parameter.data = parameter.data.to(mesh.device_type)
    reduce_dtype = torch.float32 if how.param_dtype is not None else None
    precision = MixedPrecisionPolicy(param_dtype=how.param_dtype, reduce_dtype=reduce_dtype)
    pinned = mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if how.cpu_offload else OffloadPolicy()
    for module in (*layers_of(model), model):
        keep = False if not how.reshard_after_forward else None  # FSDP's own choice: all but the root's
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=keep,
            mp_policy=precision,
            offload_policy=offload,
            ignored_params=apart,
        )
    if hasattr(model, "loss"):
        register_fsdp_forward_method(model, "loss")


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The modules of the longest stretch of equals: of the list of modules of one class that has most parameters."""
    lists = [
        each
        for each in model.modules()
        if isinstance(each, nn.ModuleList) and len({type(layer) for layer in each}) == 1
    ]
    sizes = [sum(p.numel() for p in each.parameters()) for each in lists]
    return list(lists[sizes.index(max(sizes))]) if lists else []


def gathered(named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """All parameters, whole and on the CPU, on this peer's rank 0; nothing on the others.

    Blocks, and collective: all ranks call it. One parameter at a time is gathered on the device.
    """
    leads = not dist.is_initialized() or dist.get_rank() == 0
    found: dict[str, Tensor] = {}
    for name, tensor in named_parameters:
        with torch.no_grad():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        if leads:
            found[name] = whole.cpu()
    return found
