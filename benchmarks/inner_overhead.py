"""What our inner step costs beside a bare PyTorch loop: same model, same optimizer, same batches.

Both work on one model and one optimizer object, so that memory layout and caches favour neither. They take
turns in random order, a batch each, and the medians of each repetition are compared. Prints one JSON object:
`ratio` is of wall time, `cpu_ratio` of this process's processor time, which other programs disturb less.

    python benchmarks/inner_overhead.py [--quick] [--device cpu] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from atoll.train.adamw import make_adamw
from atoll.train.init import initialize
from atoll.train.inner import InnerStep
from atoll.train.llama import Llama, LlamaConfig
from atoll.train.lr_schedule import LRSchedule
from atoll.train.metrics import ThroughputMeter

CLIP_NORM, BATCH, LENGTH, VOCAB = 1.0, 8, 128, 256
TARGET = 1.02
WARM_UP = 5  # turns

Step = Callable[[Tensor, Tensor, int], None]


class Seconds(NamedTuple):
    wall: float
    cpu: float


SCHEDULE = LRSchedule(kind="cosine", peak_lr=1e-3, total_steps=100_000, warmup_steps=100)


def our_step(model: Llama, optimizer: torch.optim.Optimizer, device: torch.device) -> Step:
    """The product's inner step, with the meter that the loop feeds."""
    inner = InnerStep(model, optimizer, SCHEDULE, clip_norm=CLIP_NORM, device=device)
    speed = ThroughputMeter()
    speed.start(time.monotonic())

    def step(inputs: Tensor, targets: Tensor, run_step: int) -> None:
        report = inner.step(inputs, targets, run_step)
        speed.add(report.tokens, time.monotonic())

    return step


def bare_step(model: Llama, optimizer: torch.optim.Optimizer, device: torch.device) -> Step:
    """What one writes by hand: schedule, loss, backward, clip, step, and the loss to print."""

    def step(inputs: Tensor, targets: Tensor, run_step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = SCHEDULE(run_step)
        loss = model.loss(inputs.to(device), targets.to(device))
        loss.backward()
        clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def measure(
    steps: dict[str, Step], count: int, device: torch.device, order: random.Random
) -> dict[str, Seconds]:
    """Median seconds of `count` turns of each step, after a few that do not count."""
    ids = torch.randint(0, VOCAB, (16, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    turns: dict[str, list[Seconds]] = {name: [] for name in steps}
    for turn in range(WARM_UP + count):
        batch = ids[turn % len(ids)]
        for name in order.sample(sorted(steps), len(steps)):
            wall, processor = time.perf_counter(), time.process_time()
            steps[name](batch[:, :-1], batch[:, 1:], turn)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            turns[name].append(Seconds(time.perf_counter() - wall, time.process_time() - processor))
    return {name: medians(seconds[WARM_UP:]) for name, seconds in turns.items()}


def medians(seconds: list[Seconds]) -> Seconds:
    return Seconds(*(statistics.median(column) for column in zip(*seconds, strict=True)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads; 1 is steadiest on a shared machine"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="order of the turns")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    layers, count = (2, 30) if options.quick else (4, 60)
    shape = LlamaConfig(
        vocab_size=VOCAB,
        dim=128,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        ffn_dim=352,
        max_seq_len=LENGTH,
    )
    model = Llama(shape)
    initialize(model, seed=0)
    model.to(device)
    optimizer = make_adamw(model, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    steps = {"ours": our_step(model, optimizer, device), "bare": bare_step(model, optimizer, device)}

    order = random.Random(options.seed)
    runs = [measure(steps, count, device, order) for _ in range(options.repetitions)]
    ratios = [Seconds(run["ours"].wall / run["bare"].wall, run["ours"].cpu / run["bare"].cpu) for run in runs]
    typical = medians(ratios)
    result = {
        "ratio": round(typical.wall, 4),
        "cpu_ratio": round(typical.cpu, 4),
        "target": TARGET,
        "ratios": [round(ratio.wall, 4) for ratio in ratios],
        "ours_ms": round(1e3 * medians([run["ours"] for run in runs]).wall, 3),
        "bare_ms": round(1e3 * medians([run["bare"] for run in runs]).wall, 3),
        "steps_each": count * options.repetitions,
        "parameters": shape.num_parameters(),
        "device": str(device),
        "torch": torch.__version__,
        "seed": options.seed,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
