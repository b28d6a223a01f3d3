"""`atoll join`: take part in a run under way, or about to begin, with nothing but its join line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from atoll import log
from atoll.cli.finding import coordinator_of
from atoll.cli.join_line import JoinLinePrinter
from atoll.cli.options import Assignments, Authority, TokenFile
from atoll.config.dump import write_resolved
from atoll.config.environment import run_authority, run_token
from atoll.config.load import load, load_joined
from atoll.config.schema import RunConfig
from atoll.dashboard.console import EventPrinter
from atoll.errors import ConfigError
from atoll.events import Sink
from atoll.signals import ended_in_time


def join(
    address: Annotated[
        str,
        Parameter(
            help="The coordinator, as the join line gives it: host:port; or dht:HOST:PORT,HOST:PORT, to ask these "
            "bootstrap peers of the DHT where it is (extra [dht])."
        ),
    ],
    /,
    *,
    run: Annotated[str, Parameter(help="The run's name, as the join line gives it.")],
    set_: Assignments = None,
    authority: Authority = "",
    wait: Annotated[float, Parameter(help="Seconds to wait for a coordinator that is not up yet.")] = 0.0,
    token_file: TokenFile = None,
) -> int:
    """Join a run: model, data, learning rate and all timeouts come from it; only [local] keys are this machine's.

    If the run is under way, its newest state is fetched from other peers first; they do not wait for that. The
    coordinator and every peer print this line, ready to paste.

    A newcomer of several ranks is started by torchrun; how many the others have does not matter. The two dashes keep
    torchrun from taking --run for an option of its own.

    Of bootstrap peers any one that is alive is enough, and if the coordinator moves, it is found again. Only what the
    run's authority signed is believed: docs/discovery.md.

    Try:

        ATOLL_TOKEN=... atoll join 10.0.0.5:7070 --run my-run
        torchrun --nproc_per_node=8 -m -- atoll join 10.0.0.5:7070 --run my-run --set local.device=cuda
        atoll join 10.0.0.5:7070 --run my-run --set local.device=cuda --set local.peer=bern
        atoll join dht:east:7071,bern:7071 --run my-run --authority sha256:...

    Exit codes: as `atoll train`.
    """
    fingerprint = run_authority(authority)
    token = run_token(token_file, needed=not fingerprint)
    with ended_in_time():
        own = [f"local.coordinator={address}", f"local.authority={fingerprint}", *(set_ or [])]
        mine = load(None, [f"run.name={run}", *own])
        settings = _settings_of_run(coordinator_of(mine, wait), run, token, wait, mine)
        from atoll.mesh.ranks import ranks_of_this_peer
        from atoll.train.build import default_peer_name, run_folder, run_peer

        config = load_joined(settings, own)
        log.to_stderr("WARNING")
        with ranks_of_this_peer(config.local.device) as (crew, mesh):
            peer = crew.decide(str, lambda: config.local.peer or default_peer_name())
            local = config.local.model_copy(update={"peer": peer})
            config = config.model_copy(update={"local": local})
            sinks: list[Sink] = []
            if crew.is_lead:
                write_resolved(config, Path(run_folder(config)) / f"{local.peer}.toml")
                console = Console(highlight=False)
                sinks = [
                    JoinLinePrinter(console, local.coordinator, local.authority),
                    EventPrinter(console),
                ]
            run_peer(config, token=token, wait_s=wait, sinks=sinks, joins=True, crew=crew, mesh=mesh)
    return 0


def _settings_of_run(address: str, run: str, token: bytes, wait_s: float, own: RunConfig) -> dict[str, Any]:
    # the client of membership takes a moment to import; a missing token is told at once
    from atoll.diloco.badge import way_in
    from atoll.membership.operator import Done, RunSettings, SettingsWanted
    from atoll.membership.operator_link import ask_leader

    local = own.local
    token, secure = way_in(
        address,
        peer=local.peer,
        token=token,
        fingerprint=local.authority,
        folder=Path(local.out) / run,
        wait_s=wait_s,
    )
    reply = ask_leader(address, token, SettingsWanted(run), secure, wait_s=wait_s)
    if isinstance(reply, Done):
        raise ConfigError(reply.reason)
    if not isinstance(reply, RunSettings) or reply.settings is None:
        raise ConfigError(
            f"run {run!r} has no settings yet: its coordinator was started without a RUN.toml, and no peer has "
            "declared any; begin it with `atoll train RUN.toml`"
        )
    return reply.settings
