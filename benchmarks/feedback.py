"""What error feedback brings, on a toy: held-out error of a small network, by codec and number of peers.

    python benchmarks/feedback.py

A network of 16 inputs, 32 tanh units and 8 outputs learns the tanh of its first 8 inputs. Peers share batches of 64,
take 5 AdamW steps a round (lr 0.01), and average, 80 rounds: no outer momentum, so that the codec is all that differs.
A minute or two.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch
from torch import nn

from atoll.diloco.schedule import OuterSchedule
from atoll.diloco.simulation import simulate
from atoll.diloco.work import Work
from atoll.state.tensors import ModelTensors

CODECS = ("fp32", "int8", "int4", "e3m0", "stat2", "topk", "topk256")
PEERS = (1, 2, 4)
BATCH, INNER_STEPS, STEPS = 64, 5, 400
HELD_OUT = range(10_000, 10_020)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 16, generator=generator)
    return inputs, torch.tanh(inputs[:, :8])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))


@dataclass
class Learner:
    """A virtual peer that trains on every `count`-th row of each batch."""

    index: int
    count: int
    model: nn.Module = field(default_factory=network)

    def __post_init__(self) -> None:
        self.tensors = ModelTensors(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, betas=(0.9, 0.99), foreach=False)

    def train(self, steps: int, run_step: int) -> Work:
        work = Work()
        for step in range(run_step, run_step + steps):
            inputs, targets = batch(step)
            rows = slice(self.index, None, self.count)
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(inputs[rows]), targets[rows])
            loss.backward()
            self.optimizer.step()
            work.add(1, loss.item())
        return work


def held_out_error(codec: str, num_peers: int, error_feedback: float) -> float:
    """Mean squared error of the anchor after the last round."""
    peers = [Learner(index, num_peers) for index in range(num_peers)]
    schedule = OuterSchedule.constant(INNER_STEPS, 1.0, 0.0, False, STEPS)
    run = simulate(peers, schedule, codec=codec, error_feedback=error_feedback)
    peers[0].tensors.write(run.state.anchor)
    with torch.no_grad():
        losses = [nn.functional.mse_loss(peers[0].model(batch(step)[0]), batch(step)[1]) for step in HELD_OUT]
    return torch.stack(losses).mean().item()


def main() -> int:
    torch.set_num_threads(1)
    print("Held-out squared error times 10^5, without feedback and with 0.95 of it.\n")
    print(f"| peers | {' | '.join(f'`{codec}`' for codec in CODECS)} |")
    print(f"| ---: | {' | '.join('---:' for _ in CODECS)} |")
    for num_peers in PEERS:
        cells = []
        for codec in CODECS:
            errors = [held_out_error(codec, num_peers, share) for share in (0.0, 0.95)]
            cells.append(", ".join(f"{1e5 * error:.0f}" for error in errors))
        print(f"| {num_peers} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
