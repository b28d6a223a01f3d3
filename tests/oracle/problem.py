"""The small problem of the oracles: a tanh MLP on random regression data that is a function of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from atoll.diloco.schedule import OuterSchedule
from atoll.diloco.simulation import SimulatedRun, simulate
from atoll.diloco.work import Work
from atoll.state.feedback import Share
from atoll.state.tensors import ModelTensors

BATCH = 64
OptimizerOf = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def sgd(lr: float) -> OptimizerOf:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.01, foreach=False)


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))


def data(step: int, batch: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11 * 100003 + step)
    return torch.randn(batch, 16, generator=generator), torch.randn(batch, 8, generator=generator)


class Worker:
    """A virtual peer that trains on shard `index` of `count` of every batch (count 1: on the whole batch)."""

    def __init__(
        self, index: int, count: int, optimizer: OptimizerOf, *, tokens: int = 1, skip: int = 0
    ) -> None:
        self.model = make_model()
        self.tensors = ModelTensors(self.model.named_parameters())
        self.optimizer = optimizer(list(self.model.parameters()))
        self.index, self.count, self.tokens, self.skip = index, count, tokens, skip

    def train(self, steps: int, run_step: int) -> Work:
        work = Work()
        for step in range(run_step, run_step + steps - self.skip):
            inputs, targets = data(step)
            size = BATCH // self.count
            part = slice(self.index * size, (self.index + 1) * size)
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(inputs[part]), targets[part])
            loss.backward()
            self.optimizer.step()
            work.add(self.tokens, loss.item())
        return work


def diloco(
    num_peers: int,
    inner_steps: int,
    total_steps: int,
    *,
    optimizer: OptimizerOf = adamw,
    lr: float = 1.0,
    momentum: float = 0.0,
    nesterov: bool = True,
    same_data: bool = False,
    codec: str = "fp32",
    error_feedback: Share = "auto",
    absent: Callable[[int], Sequence[int]] = lambda round_: (),
    workers: Sequence[Worker] | None = None,
) -> SimulatedRun:
    peers = workers or [
        Worker(0 if same_data else i, 1 if same_data else num_peers, optimizer) for i in range(num_peers)
    ]
    schedule = OuterSchedule.constant(inner_steps, lr, momentum, nesterov, total_steps)
    return simulate(peers, schedule, codec=codec, error_feedback=error_feedback, absent=absent)


def plain(total_steps: int, optimizer: OptimizerOf) -> torch.Tensor:
    """Ordinary training on the whole batch: the flat weights at the end."""
    worker = Worker(0, 1, optimizer)
    worker.train(total_steps, 0)
    return torch.from_numpy(worker.tensors.read())


def relative(a: object, b: object) -> float:
    one, other = torch.as_tensor(a), torch.as_tensor(b)
    return ((one - other).abs().max() / other.abs().max()).item()
