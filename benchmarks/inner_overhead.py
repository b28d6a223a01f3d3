"""What our training loop costs beside a bare PyTorch loop: same model, same optimizer, same batches.

"Ours" is a peer of a real run: `train.loop.train` with a session at a coordinator on loopback, heartbeats, the
outer loop, events to a file. Its one round is longer than the measurement, so nothing is exchanged: this is what
is paid at every step. "Bare" is what one writes by hand. Each is a process of its own, since a heartbeat must not
disturb both. They take turns, a block of steps each, in random order, while the other stands still; both read
their batches from the same text by the same reader, inside the timed block.

Prints one JSON object: `ratio` is the median over the turns of ours / bare in wall time, `cpu_ratio` the same in
the processes' own processor time, which other programs disturb less.

    python benchmarks/inner_overhead.py [--quick] [--device cpu] [--seed 0]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.utils import clip_grad_norm_

from atoll.clock import MonotonicClock
from atoll.config.environment import for_child
from atoll.config.schema import (
    DataSection,
    InnerSection,
    LocalSection,
    ModelSection,
    OuterSection,
    RunConfig,
    RunSection,
)
from atoll.diloco.joining import open_session
from atoll.network.addresses import engine_address
from atoll.state.tensors import ModelTensors
from atoll.train.batches import Batch
from atoll.train.build import batches_of, cut_slots, load_corpus, outer_schedule
from atoll.train.leases_here import OwnSlots
from atoll.train.loop import train
from atoll.train.models import build_inner, build_model, lr_schedule
from atoll.train.observer import Observer

TARGET = 1.02
BLOCK = 10  # steps of a turn; as many as `log_every`, so that each turn writes an event
WARM_UP = 2  # turns that do not count
ANSWER_S = 300.0  # for one turn, and for a worker's start
TEXT = str(Path(json.__file__).parents[1] / "email")  # a few hundred kB of the standard library
MANY_STEPS = 1_000_000
TOKEN = "overhead: nothing here is secret"


class Seconds(NamedTuple):
    wall: float
    cpu: float

    @staticmethod
    def now() -> Seconds:
        return Seconds(time.perf_counter(), time.process_time())


class TurnsOver(Exception):
    """Nobody asks for another block."""


class Turns:
    """A reader's batches, in blocks: before each it waits for its turn, after each it reports what it took."""

    def __init__(self, config: RunConfig, turns: Connection) -> None:
        slots = cut_slots(load_corpus(config), config)
        self._batches = batches_of(
            slots, config, "ours", OwnSlots(slots.count, config.run.seed, "ours"), own_data="ours"
        )
        self._batches.begin()
        self._turns, self._cuda = turns, config.local.device.startswith("cuda")
        self._left, self._began = 0, Seconds(0.0, 0.0)

    def take(self) -> Batch | None:
        if self._left == 0:
            self._end_block()
            if not self._turns.recv():
                raise TurnsOver
            self._left, self._began = BLOCK, Seconds.now()
        self._left -= 1
        return self._batches.take()

    def _end_block(self) -> None:
        """Report the block that is over; before the first one, that this worker is up."""
        if self._cuda:
            torch.cuda.synchronize()
        now = Seconds.now()
        self._turns.send(Seconds(now.wall - self._began.wall, now.cpu - self._began.cpu))


def ours(config: RunConfig, turns: Connection) -> None:
    """The product's loop, as `train.build` puts it together."""
    torch.set_num_threads(config.local.threads)
    model = build_model(config)
    inner = build_inner(model, config)
    with open_session(
        config.local.coordinator,
        run=config.run.name,
        peer="ours",
        token=TOKEN.encode(),
        engine=engine_address(config.local.coordinator, "", 0, ""),
        out=Path(config.local.out),
        total_steps=config.run.steps,
    ) as session:
        outer = session.open_rounds(
            outer_schedule(config.outer, config.run.steps),
            codec=config.outer.codec,
            settings={},
            tensors=ModelTensors(model.named_parameters(remove_duplicate=False)),
            inner=inner.optimizer,
        )
        observer = Observer(
            session,
            evaluate=lambda: 0.0,
            eval_tokens=0,
            every_rounds=0,
            log_every=config.local.log_every,
            clock=MonotonicClock(),
        )
        with contextlib.suppress(TurnsOver):  # the turns are over before the run is
            train(session, inner, Turns(config, turns), outer, observer)


def bare(config: RunConfig, turns: Connection) -> None:
    """What one writes by hand: schedule, loss, backward, clip, step, and the loss to print."""
    torch.set_num_threads(config.local.threads)
    device = torch.device(config.local.device)
    model = build_model(config)
    model.train()
    optimizer = build_inner(model, config).optimizer
    schedule = lr_schedule(config.inner, config.run.steps)
    batches = Turns(config, turns)
    with contextlib.suppress(TurnsOver):
        for step in itertools.count():
            batch = batches.take()
            assert batch is not None, "its slots are read once more for ever"
            for group in optimizer.param_groups:
                group["lr"] = schedule(step)
            loss = model.loss(batch.inputs.to(device), batch.targets.to(device))
            loss.backward()
            clip_grad_norm_(model.parameters(), config.inner.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()


WORKERS: dict[str, Callable[[RunConfig, Connection], None]] = {"ours": ours, "bare": bare}


def measure(config: RunConfig, count: int, order: random.Random) -> dict[str, list[Seconds]]:
    """What each of `count` turns took; in turn i of either, the same batches were read."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    try:
        for name, work in WORKERS.items():
            pipes[name], theirs = context.Pipe()
            process = context.Process(target=work, args=(config, theirs), daemon=True)
            process.start()
            processes.append(process)
            theirs.close()
        for name, pipe in pipes.items():
            answer(name, pipe)
        taken: dict[str, list[Seconds]] = {name: [] for name in pipes}
        for _ in range(WARM_UP + count):
            for name in order.sample(sorted(pipes), len(pipes)):
                pipes[name].send(True)
                taken[name].append(answer(name, pipes[name]))
        for pipe in pipes.values():
            pipe.send(False)
        for process in processes:
            process.join(ANSWER_S)
    finally:
        for process in processes:
            process.kill()
    return {name: seconds[WARM_UP:] for name, seconds in taken.items()}


def answer(name: str, pipe: Connection) -> Seconds:
    if not pipe.poll(ANSWER_S):
        sys.exit(f"{name}: no answer within {ANSWER_S:.0f} s")
    try:
        return pipe.recv()
    except EOFError:
        sys.exit(f"{name} ended early; see above")


@contextlib.contextmanager
def coordinator(run: str, folder: Path) -> Iterator[str]:
    """A coordinator process on loopback; gives its address."""
    command = [sys.executable, "-m", "atoll", "coordinator", "--run", run, "--bind", "127.0.0.1:0"]
    settings = ["--set", "membership.start_peers=1", "--out", str(folder)]
    with subprocess.Popen(
        [*command, *settings], env=for_child(TOKEN), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            found = next(
                filter(None, (re.search(r"local\.coordinator=(\S+)", line) for line in process.stdout)), None
            )
            if found is None:
                sys.exit("the coordinator did not start; see above")
            yield found[1]
        finally:
            process.terminate()


def settings(options: argparse.Namespace, address: str, folder: Path) -> RunConfig:
    return RunConfig(
        run=RunSection(name="overhead", steps=MANY_STEPS),
        model=ModelSection(
            dim=128,
            num_layers=2 if options.quick else 4,
            num_heads=4,
            num_kv_heads=2,
            ffn_dim=352,
            max_seq_len=128,
        ),
        data=DataSection(sources=(TEXT,), seq_len=128),
        inner=InnerSection(batch_size=8),
        outer=OuterSection(inner_steps=MANY_STEPS),
        local=LocalSection(
            coordinator=address,
            out=str(folder),
            device=options.device,
            threads=options.threads,
            log_every=BLOCK,
        ),
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer turns")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads; 1 is steadiest on a shared machine"
    )
    parser.add_argument("--turns", type=int, default=0, help=f"blocks of {BLOCK} steps; default 24, quick 8")
    parser.add_argument("--seed", type=int, default=0, help="order of the turns")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    count = options.turns or (8 if options.quick else 24)
    with tempfile.TemporaryDirectory() as folder, coordinator("overhead", Path(folder)) as address:
        config = settings(options, address, Path(folder))
        taken = measure(config, count, random.Random(options.seed))
    pairs = list(zip(taken["ours"], taken["bare"], strict=True))
    ratios = [Seconds(mine.wall / theirs.wall, mine.cpu / theirs.cpu) for mine, theirs in pairs]
    result = {
        "ratio": round(statistics.median(ratio.wall for ratio in ratios), 4),
        "cpu_ratio": round(statistics.median(ratio.cpu for ratio in ratios), 4),
        "target": TARGET,
        "ratios": [round(ratio.wall, 4) for ratio in ratios],
        "cpu_ratios": [round(ratio.cpu, 4) for ratio in ratios],
        "ours_ms": round(1e3 / BLOCK * statistics.median(mine.wall for mine, _ in pairs), 3),
        "bare_ms": round(1e3 / BLOCK * statistics.median(theirs.wall for _, theirs in pairs), 3),
        "steps_each": count * BLOCK,
        "parameters": build_model(config).config.num_parameters(),
        "device": options.device,
        "torch": torch.__version__,
        "seed": options.seed,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
