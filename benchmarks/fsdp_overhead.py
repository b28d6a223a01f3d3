"""What our inner step costs beside a bare FSDP2 loop: same model, same ranks, same optimizer, same batches.

"Ours" is `train.inner.InnerStep` on a Llama that `train.sharding.shard` has cut, which also takes the mean loss over
the ranks. "Bare" is what one writes by hand: `fully_shard` layer by layer, forward, backward, `clip_grad_norm_`, step.
Both live in the same processes, one a rank, and take turns, a block of steps each, in random order.

Prints one JSON object: `ratio` is the median over the turns of ours / bare in wall time, `cpu_ratio` the same in the
processor time of all ranks together, which other programs disturb less.

    python benchmarks/fsdp_overhead.py [--ranks 2] [--quick] [--device cpu] [--seed 0]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.utils import clip_grad_norm_

from atoll.train.adamw import make_adamw
from atoll.train.init import initialize
from atoll.train.inner import InnerStep
from atoll.train.llama import Llama, LlamaConfig
from atoll.train.ranks import Ranks
from atoll.train.sharding import shard

TARGET = 1.02
BLOCK = 10  # steps of a turn
WARM_UP = 2  # turns that do not count
LIMIT_S = 1800.0
LR, CLIP = 3e-3, 1.0
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
Step = Callable[[torch.Tensor, torch.Tensor], float]
"""Gives the step's loss: ours over all ranks, the bare loop's over its own rows."""


def shape(quick: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256,
        dim=128,
        num_layers=2 if quick else 4,
        num_heads=4,
        num_kv_heads=2,
        ffn_dim=352,
        max_seq_len=128,
    )


def made(options: argparse.Namespace) -> Llama:
    model = Llama(shape(options.quick))
    initialize(model, 1)
    return model.to(options.device)


def optimizer_of(model: Llama) -> torch.optim.AdamW:
    return make_adamw(model, lr=LR, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)


def ours(model: Llama, mesh: DeviceMesh, device: str) -> Step:
    shard(model, mesh)
    optimizer, ranks = optimizer_of(model), Ranks.of(mesh)
    inner = InnerStep(model, optimizer, lambda _: LR, clip_norm=CLIP, device=device, ranks=ranks)
    count = itertools.count()

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        return inner.step(inputs, targets, next(count)).loss

    return step


def bare(model: Llama, mesh: DeviceMesh, device: str) -> Step:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "loss")
    model.train()
    optimizer = optimizer_of(model)
    rank, num_ranks = mesh.get_local_rank(), mesh.size()

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        each = len(inputs) // num_ranks
        own = slice(rank * each, (rank + 1) * each)
        for group in optimizer.param_groups:
            group["lr"] = LR
        loss = model.loss(inputs[own].to(device), targets[own].to(device))
        loss.backward()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def batches(seed: int) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(0, 256, (8, 129), generator=generator)
        yield ids[:, :-1], ids[:, 1:]


def one_rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(options.threads)
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    rendezvous = f"file://{folder}/rendezvous"
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=options.ranks)
    mesh = init_device_mesh(options.device, (options.ranks,))
    loops = {
        "ours": ours(made(options), mesh, options.device),
        "bare": bare(made(options), mesh, options.device),
    }
    read = {name: batches(options.seed) for name in loops}
    order = random.Random(options.seed)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    losses = dict.fromkeys(loops, 0.0)
    for _ in range(WARM_UP + options.turns):
        for name in order.sample(sorted(loops), len(loops)):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(BLOCK):
                losses[name] = loops[name](*next(read[name]))
            if cuda:
                torch.cuda.synchronize()
            taken[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    Path(folder, f"{rank}.json").write_text(json.dumps({"taken": taken, "losses": losses}))
    dist.barrier()
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """For each loop and turn: wall time of the slowest rank, processor time of all."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=one_rank, args=(rank, options, folder), daemon=True)
            for rank in range(options.ranks)
        ]
        for process in ranks:
            process.start()
        until = time.monotonic() + LIMIT_S
        try:
            for process in ranks:
                process.join(max(0.0, until - time.monotonic()))
                if process.exitcode != 0:
                    sys.exit("a rank failed, or took too long; see above")
        finally:
            for process in ranks:
                process.kill()
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options.ranks)]
    mine, theirs = (statistics.mean(each["losses"][name] for each in found) for name in ("ours", "bare"))
    if not math.isclose(mine, theirs, rel_tol=1e-3):
        sys.exit(f"the loops do not do the same: a loss of {mine} here, {theirs} there")
    return {
        name: [
            (max(wall for wall, _ in turn), sum(cpu for _, cpu in turn))
            for turn in zip(*(each["taken"][name] for each in found), strict=True)
        ][WARM_UP:]
        for name in ("ours", "bare")
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer turns")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU for each rank")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each rank")
    parser.add_argument("--turns", type=int, default=0, help=f"blocks of {BLOCK} steps; default 24, quick 8")
    parser.add_argument("--seed", type=int, default=0, help="batches, and the order of the turns")
    options = parser.parse_args()
    options.turns = options.turns or (8 if options.quick else 24)
    return options


def main() -> None:
    options = arguments()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    taken = measure(options)
    pairs = list(zip(taken["ours"], taken["bare"], strict=True))
    walls = [mine[0] / theirs[0] for mine, theirs in pairs]
    cpus = [mine[1] / theirs[1] for mine, theirs in pairs]
    result = {
        "ratio": round(statistics.median(walls), 4),
        "cpu_ratio": round(statistics.median(cpus), 4),
        "target": TARGET,
        "ratios": [round(each, 4) for each in walls],
        "cpu_ratios": [round(each, 4) for each in cpus],
        "ours_ms": round(1e3 / BLOCK * statistics.median(mine[0] for mine, _ in pairs), 3),
        "bare_ms": round(1e3 / BLOCK * statistics.median(theirs[0] for _, theirs in pairs), 3),
        "steps_each": options.turns * BLOCK,
        "ranks": options.ranks,
        "parameters": shape(options.quick).num_parameters(),
        "device": options.device,
        "torch": torch.__version__,
        "seed": options.seed,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
