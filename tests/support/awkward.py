"""A model of everything that trips frameworks up (K13), and how its peers train it."""

from __future__ import annotations

import torch
from torch import nn

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
