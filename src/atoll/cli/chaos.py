"""`atoll chaos`: faults on purpose, for a run on this machine."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from atoll.cli.evict import parse_duration
from atoll.cli.output import deliver
from atoll.cli.rehearsal import KINDS, Rehearsal
from atoll.config.load import load
from atoll.config.schema import RunConfig
from atoll.errors import ConfigError, LocalError

NEED_NETWORK = ("cut", "slow")
POLL_S = 0.2
SEEDS = 1_000_000


def chaos(
    run: Annotated[
        Path, Parameter(help="The run's folder: local.out/run.name, as `atoll launch` prints it.")
    ],
    /,
    *,
    every: Annotated[str, Parameter(help="Mean time between two faults: 5s, 20s, 2m.")] = "20s",
    kinds: Annotated[
        str, Parameter(help="Of kill, stop, join, leave; separated by commas.")
    ] = "kill,stop,join",
    seed: Annotated[
        int | None,
        Parameter(help="The same faults again. Default: a random one, printed.", show_default=False),
    ] = None,
) -> int:
    """A dress rehearsal: kill, freeze and start peers of a run on this machine, until it is over or Ctrl-C.

    kill: SIGKILL. stop: SIGSTOP for up to twice membership.dead_s, then SIGCONT. leave: SIGTERM. join: one that is gone
    is started again as it was, or else a newcomer. membership.min_peers are always left alone. Only processes that
    are certainly peers of this run are touched. Each fault is one line here, and an event in `chaos.jsonl`. At
    its end, what is stopped goes on, and the peers that it started leave.

    Try:

        atoll launch recipes/tiny-stdlib.toml --peers 4 &
        atoll chaos runs/tiny-stdlib-20260131-235959 --every 20s --kinds kill,stop,join

    Exit codes: 0 the run is over; 2 usage; 3 no such run on this machine; 130/143 stopped.
    """
    chosen, every_s = parse_kinds(kinds), parse_duration(every, "--every")
    settings = _settings(run)
    seed = random.randrange(SEEDS) if seed is None else seed
    chance = random.Random(seed)
    with Rehearsal(
        run,
        kinds=chosen,
        random=chance,
        min_living=settings.membership.min_peers,
        stop_s=2 * settings.membership.dead_s,
        say=lambda text: deliver(text + "\n"),
    ) as rehearsal:
        num_peers = len(rehearsal.living())
        if not num_peers:
            raise LocalError(f"no peer of {run} lives on this machine; a run that is over needs no rehearsal")
        deliver(f"seed {seed}: {', '.join(chosen)} about every {every_s:g} s for {num_peers} peers\n")
        while _pause(rehearsal, min(chance.expovariate(1 / every_s), 3 * every_s)):
            rehearsal.play()
    deliver("the run is over\n")
    return 0


def parse_kinds(text: str) -> tuple[str, ...]:
    """`kill,stop` as a tuple. Raises ConfigError."""
    kinds = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for kind in kinds:
        if kind in NEED_NETWORK:
            raise ConfigError(
                f"--kinds {kind}: links can be cut or slowed only in network namespaces of their own, and peers of a "
                "local run share loopback; `make wan` rehearses that"
            )
        if kind not in KINDS:
            raise ConfigError(f"--kinds {kind}: unknown; choose of {', '.join(KINDS)}")
    if not kinds:
        raise ConfigError(f"--kinds {text!r}: none is named; choose of {', '.join(KINDS)}")
    return kinds


def _settings(folder: Path) -> RunConfig:
    """The run's; defaults where its folder has none (a user's own loop)."""
    path = folder / "config.toml"
    return load(path if path.exists() else None, [], {})


def _pause(rehearsal: Rehearsal, seconds: float) -> bool:
    """Wait for the next fault, thawing meanwhile. False: no peer lives any more."""
    until_s = time.monotonic() + seconds
    while True:
        rehearsal.thaw(before_s=time.monotonic())
        if not rehearsal.living():
            return False
        if time.monotonic() >= until_s:
            return True
        time.sleep(POLL_S)
