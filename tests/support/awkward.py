"""A model of everything that trips frameworks up (K13), and how its peers train it, of one rank or of several."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

Cut = Literal["fully_shard", "distribute_tensor"]

INNER_STEPS, ROUNDS = 3, 2


class Awkward(nn.Module):
    """Tied, frozen, unused, 0-dim, 0-element, oddly sized and oddly strided parameters of several dtypes."""

    def __init__(self, reverse: bool = False) -> None:
        super().__init__()
        made = {
            "embed": nn.Embedding(7, 5),
            "head": nn.Linear(5, 7, bias=False),
            "frozen": nn.Linear(3, 3),
            "unused": nn.Linear(13, 1),
            "one": nn.Linear(1, 1, bias=False),
            "odd": nn.Linear(1023, 1, bias=False),
        }
        for name in reversed(list(made)) if reverse else made:
            setattr(self, name, made[name])
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.turned = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
        self.brain = nn.Parameter(torch.linspace(-1, 1, 9, dtype=torch.bfloat16))
        self.double_ = nn.Parameter(torch.linspace(-1, 1, 3, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(3))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in sorted(self.named_parameters(remove_duplicate=False)):
                if "." in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))


def inner_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def loss_of(model: Awkward, index: int, step: int) -> torch.Tensor:
    """Uses all parameters but `unused`, and `one` on the first peer only (a gradient on one peer)."""
    generator = torch.Generator().manual_seed(1000 * index + step)
    tokens = torch.randint(0, 7, (4,), generator=generator)
    hidden = model.embed(tokens) * model.scale
    loss = nn.functional.cross_entropy(model.head(hidden), (tokens + 1) % 7)
    loss = loss + model.odd(torch.randn(2, 1023, generator=generator)).square().mean() * 1e-3
    loss = loss + (model.turned - 1).square().sum() * 0.1 + model.frozen(model.turned.t()).sum() * 1e-3
    loss = loss + model.brain.float().square().sum() * 0.1 + model.double_.square().sum().float() * 0.1
    if index == 0:
        loss = loss + model.one(torch.ones(1, 1)).sum()
    return loss


def train_step(model: Awkward, optimizer: torch.optim.Optimizer, index: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, index, step).backward()
    optimizer.step()


def lay_out(model: Awkward, mesh: DeviceMesh, cut: Cut) -> None:
    """Put the model on the ranks of `mesh`, each parameter as one of the ways that there are has it.

    `fully_shard` takes neither strides, nor a second dtype in a group, nor what has no element or dimension: those are
    cut by hand, or stay whole, as plain tensors or as replicas.
    """
    ways: dict[str, Placement | None] = {"scale": None, "empty": None, "double_": None, "brain": Shard(0)}
    ways |= {"turned": Shard(0)}
    if cut == "distribute_tensor":
        ways |= {name: Shard(0) for name, p in model.named_parameters() if p.ndim}
        ways |= {"one.weight": Replicate(), "double_": Replicate(), "odd.weight": None}
    parameters = dict(model.named_parameters())
    made = {parameters[name]: _placed(parameters[name], mesh, way) for name, way in ways.items()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter in made:
                setattr(module, name, made[parameter])  # a tied one is the same again in both places
    if cut == "fully_shard":
        fully_shard(model, mesh=mesh, ignored_params=set(made.values()))


def train_cut_step(model: Awkward, optimizer: torch.optim.Optimizer, index: int, step: int) -> None:
    """`train_step` for a model that is cut: its ranks read the same batch, and each keeps its rows of the gradient.

    So no average over ranks comes in, which would round: the bits are those of one rank.
    """
    whole = Awkward()
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(whole_of(model.get_parameter(name)))
    loss_of(whole, index, step).backward()
    optimizer.zero_grad()
    for name, parameter in whole.named_parameters():
        ours = model.get_parameter(name)
        if parameter.grad is not None and isinstance(ours, DTensor):
            ours.grad = distribute_tensor(
                parameter.grad, ours.device_mesh, ours.placements, src_data_rank=None
            )
        else:
            ours.grad = parameter.grad
    optimizer.step()


def whole_of(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _placed(parameter: Tensor, mesh: DeviceMesh, way: Placement | None) -> nn.Parameter:
    if way is None:
        assert isinstance(parameter, nn.Parameter)
        return parameter
    cut = distribute_tensor(parameter.detach(), mesh, [way], src_data_rank=None)
    return nn.Parameter(cut, requires_grad=parameter.requires_grad)
