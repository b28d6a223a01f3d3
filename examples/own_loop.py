"""Your own model and your own loop, on several machines.

With a coordinator for the run "own-loop" (README has the commands), start this script in two terminals:

    export ATOLL_TOKEN_FILE=runs/token
    python examples/own_loop.py [HOST:PORT]      # of the coordinator; default 127.0.0.1:7070

Both print the same digest at the end.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import atoll
from atoll.errors import AtollError


def make_data(num_batches: int = 400) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Noisy samples of a fixed function; every peer makes the same list and reads its own part of it."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(num_batches, 32, 2, generator=generator) * 4 - 2
    targets = torch.sin(inputs[..., :1] * 2) * inputs[..., 1:] + 0.05 * torch.randn(
        num_batches, 32, 1, generator=generator
    )
    return list(zip(inputs, targets, strict=True))


def main(address: str) -> None:
    torch.set_num_threads(1)  # the model is tiny, and two peers share this machine
    torch.manual_seed(0)  # every peer must start from the same weights
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with atoll.join(address, run="own-loop", model=model, optimizer=inner, steps=1000) as session:
        optimizer = atoll.DiLoCoOptimizer(session, inner_steps=50)  # lr 0.7, momentum 0.9, nesterov, int8
        for inputs, targets in session.batches(make_data()):
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step(tokens=len(inputs), loss=loss.item())  # every 50th also the outer round
            optimizer.zero_grad()
            if session.step % 200 == 0:
                print(
                    f"step {session.step:4d}  loss {loss.item():.4f}  version {session.version}  {session.members}"
                )
    print(f"done: version {session.version}, digest {optimizer.outer.state.digest()[:16]}")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7070")
    except AtollError as error:
        sys.exit(f"own_loop: {error}")
