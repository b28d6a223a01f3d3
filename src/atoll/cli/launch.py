"""`atoll launch`: a coordinator and N peers on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from atoll.cli.local_run import LocalRun, fresh_name, threads_per_peer, unfinished
from atoll.cli.options import Assignments, RunFile
from atoll.config.load import load
from atoll.config.schema import RunConfig
from atoll.dashboard.console import Goal, display_for
from atoll.dashboard.summary import saves, saves_text
from atoll.errors import ConfigError


def launch(
    run_toml: RunFile,
    /,
    *,
    peers: Annotated[int, Parameter(help="How many peers.")] = 2,
    ranks: Annotated[
        str, Parameter(help="Ranks of each peer, or of one after the other: 2, or 1,2,3 for three peers.")
    ] = "1",
    set_: Assignments = None,
    out: Annotated[
        Path | None, Parameter(help="Folder that gets the run folder. Default: local.out.")
    ] = None,
    fresh: Annotated[
        bool, Parameter(help="Begin a new run, also if the last one is not over.", negative="")
    ] = False,
) -> int:
    """Run a coordinator and N peers on this machine, with a fresh token, until the run is over.

    Each run is named NAME-DATE-TIME. If the last one of that NAME is not over and has a checkpoint, it goes on;
    --fresh begins a new one all the same, and leaves the other as it is. The run's folder gets `config.toml`, the
    events of all (`events.jsonl`), one log per process, checkpoints, and the final model. A signal is passed on to
    all processes; if this one dies, so do they.

    A rank is a process; the model is cut among the ranks of a peer (FSDP2), and peers of different size train together.

    Try:

        atoll launch recipes/tiny-stdlib.toml --peers 2 --set run.steps=200
        atoll launch recipes/tiny-stdlib.toml --peers 2 --ranks 1,2

    Exit code: the worst of all processes.
    """
    config = with_peers(load(run_toml, set_ or []), peers)
    each = ranks_of(ranks, peers)
    parent = out or Path(config.local.out)
    going_on = None if fresh else unfinished(parent, config.run.name)
    config = in_folder(config, parent, going_on) if going_on else in_fresh_folder(config, parent)
    settings = {} if config.local.threads else {"local.threads": str(threads_per_peer(sum(each)))}
    console = Console(highlight=False)
    if going_on:
        console.print(
            f"going on with {going_on}, which is not over; --fresh begins anew", markup=False, soft_wrap=True
        )
    display = display_for(console, Goal(seconds=config.run.max_seconds, steps=config.run.steps))
    try:
        with LocalRun(
            config, num_peers=peers, peer_settings=settings, resume=going_on is not None, ranks=each
        ) as run:
            run.start()
            for _ in run.watch(display):
                pass
    finally:
        display.close()
    if told := saves_text(saves(run.seen)):
        console.print(f"saves: {told}", markup=False, soft_wrap=True)
    console.print(f"run folder: {run.folder}", markup=False, soft_wrap=True)
    run.raise_failure()
    return 0


def with_peers(config: RunConfig, peers: int) -> RunConfig:
    """The same run, beginning with exactly so many peers. Raises ConfigError."""
    if peers < 1:
        raise ConfigError(f"--peers {peers}: a run has at least 1 peer")
    if config.membership.min_peers > peers:
        raise ConfigError(
            f"--peers {peers} is below membership.min_peers = {config.membership.min_peers}; "
            "start more, or lower it with --set membership.min_peers=1"
        )
    membership = config.membership.model_copy(update={"start_peers": peers})
    return config.model_copy(update={"membership": membership})


def ranks_of(text: str, peers: int) -> list[int]:
    """`--ranks`: how many ranks each peer has. Raises ConfigError."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--ranks {text}: give one number of ranks for all peers, or one for each: 1,2,3")
    counts = [int(part) for part in parts]
    if len(counts) == 1:
        return counts * peers
    if len(counts) != peers:
        raise ConfigError(f"--ranks {text} is for {len(counts)} peers, --peers {peers}; give as many")
    return counts


def in_fresh_folder(config: RunConfig, parent: Path) -> RunConfig:
    """The same run under a name of its own, and so with a folder of its own in `parent`."""
    return in_folder(config, parent, fresh_name(parent, config.run.name))


def in_folder(config: RunConfig, parent: Path, name: str) -> RunConfig:
    """The same run under this name, in `parent`."""
    run = config.run.model_copy(update={"name": name})
    local = config.local.model_copy(update={"out": str(parent)})
    return config.model_copy(update={"run": run, "local": local})
