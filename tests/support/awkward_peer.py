"""One peer that trains the awkward model of K13 for two rounds, and writes its digests to --results."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import atoll
from support.awkward import INNER_STEPS, ROUNDS, Awkward, inner_optimizer, train_step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address")
    parser.add_argument("--peer")
    parser.add_argument("--index", type=int)
    parser.add_argument("--codec")
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = Awkward(reverse=args.index == 1)  # one peer makes its modules in another order: matched by name
    inner = inner_optimizer(model)
    steps = ROUNDS * INNER_STEPS
    with atoll.join(
        args.address, run="quadratic", model=model, optimizer=inner, steps=steps, peer=args.peer, out=None
    ) as session:
        optimizer = atoll.DiLoCoOptimizer(session, inner_steps=INNER_STEPS, codec=args.codec)
        while not session.finished():
            train_step(model, optimizer, args.index, session.step)
            if session.step % INNER_STEPS == 0:
                with args.results.open("a") as file:
                    row = {"version": session.version, "digest": optimizer.outer.state.digest()}
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
