"""`atoll train`: one peer of a run."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from atoll import log
from atoll.cli.join_line import JoinLinePrinter
from atoll.cli.options import Assignments, RunFile, TokenFile
from atoll.config.dump import write_resolved
from atoll.config.environment import run_token
from atoll.config.load import load
from atoll.config.schema import RunConfig
from atoll.dashboard.console import EventPrinter
from atoll.events import Sink
from atoll.signals import ended_in_time


def train(
    run_toml: RunFile,
    /,
    *,
    set_: Assignments = None,
    wait: Annotated[float, Parameter(help="Seconds to wait for a coordinator that is not up yet.")] = 0.0,
    token_file: TokenFile = None,
    fresh: Annotated[bool, Parameter(help="Begin anew, not from a checkpoint.", negative="")] = False,
    force: Annotated[
        bool, Parameter(help="With --fresh: give up the checkpoints that are there.", negative="")
    ] = False,
) -> int:
    """Train as one peer of a run, until its steps are committed or the coordinator ends it.

    Peers of a run have the same settings but for [local]; who differs is refused, and told where.

    If checkpoints of this run are found, training goes on from the newest one that is whole. --fresh begins anew;
    where that would overwrite some, it needs --force.

    A peer of several ranks is started by torchrun, one process for each; the model is cut among them (FSDP2).

    Try:

        atoll train recipes/laptop.toml --set local.coordinator=10.0.0.5:7070
        torchrun --nproc_per_node=8 -m atoll train recipes/laptop.toml --set local.device=cuda
        atoll train recipes/laptop.toml --set local.peer=bern --set local.device=cuda --wait 60

    Exit codes: 0 all steps committed; 2 config; 3 this machine; 4 cannot reach; 5 refused; 6 the run went on
    without this peer, or lost its quorum; 7 diverged; 8 data; 9 another rank of this peer is lost; 130/143 stopped.
    """
    config = load(run_toml, set_ or [])
    token = run_token(token_file, needed=not config.local.authority)
    with ended_in_time():
        _train(config, token, wait, fresh=fresh, force=force)
    return 0


def _train(config: RunConfig, token: bytes, wait_s: float, *, fresh: bool, force: bool) -> None:
    # torch takes seconds to import; mistakes above are told at once
    from atoll.checkpoint.begin import give_up
    from atoll.mesh.ranks import ranks_of_this_peer
    from atoll.train.build import default_peer_name, keeping, run_folder, run_peer

    log.to_stderr("WARNING")
    with ranks_of_this_peer(config.local.device) as (crew, mesh):
        peer = crew.decide(str, lambda: config.local.peer or default_peer_name())
        config = config.model_copy(update={"local": config.local.model_copy(update={"peer": peer})})
        sinks: list[Sink] = []
        if crew.is_lead:  # the others say nothing, unless something is wrong
            if fresh:
                kept = keeping(config)
                give_up(kept.path, force=force, remote=kept.remote)
            write_resolved(config, run_folder(config) / f"{peer}.toml")
            console = Console(highlight=False)
            sinks = [
                JoinLinePrinter(console, config.local.coordinator, config.local.authority),
                EventPrinter(console),
            ]
        run_peer(config, token=token, wait_s=wait_s, sinks=sinks, fresh=fresh, crew=crew, mesh=mesh)
