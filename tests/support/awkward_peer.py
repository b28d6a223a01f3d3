"""One peer that trains the awkward model of K13 for two rounds, and writes its digests to --results.

A rank of several cuts it by --cut.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

import torch

import atoll
from atoll.config.environment import rank_environment
from support.awkward import (
    INNER_STEPS,
    ROUNDS,
    Awkward,
    inner_optimizer,
    lay_out,
    train_cut_step,
    train_step,
    whole_of,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address")
    parser.add_argument("--peer")
    parser.add_argument("--index", type=int)
    parser.add_argument("--codec")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--cut", default="fully_shard")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = Awkward(reverse=args.index == 1)  # one peer makes its modules in another order: matched by name
    several = rank_environment().num_ranks > 1
    mesh = atoll.ElasticDeviceMesh() if several else None
    if mesh is not None:
        lay_out(model, mesh.local, args.cut)
    step_once = train_cut_step if several else train_step
    inner = inner_optimizer(model)
    steps = ROUNDS * INNER_STEPS
    join = functools.partial(atoll.join, args.address, run="quadratic", peer=args.peer, out=None)
    with join(model=model, optimizer=inner, steps=steps, mesh=mesh) as session:
        optimizer = atoll.DiLoCoOptimizer(session, inner_steps=INNER_STEPS, codec=args.codec)
        while not session.finished():
            step_once(model, optimizer, args.index, session.step)
            if session.step % INNER_STEPS == 0:
                row = {
                    "version": session.version,
                    "digest": optimizer.outer.state.digest(),
                    "whole": {
                        name: whole_of(each).double().flatten().tolist()
                        for name, each in model.named_parameters(remove_duplicate=False)
                    },
                    "count": model.count.item(),
                }
                if session.crew.is_lead:
                    with args.results.open("a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
