"""`atoll coordinator`: the small service that decides membership and rounds. It never touches weights."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from atoll import log
from atoll.addresses import join_address, parse_address
from atoll.cli.evict import parse_duration
from atoll.cli.finding import publisher_of
from atoll.cli.join_line import TOKEN_LINE, join_line, print_lines
from atoll.cli.options import Assignments, TokenFile
from atoll.cli.signals import Stopped
from atoll.cli.trusting import AUTHORITY, LOOPBACK, Trusted, open_trust
from atoll.config.environment import run_token
from atoll.config.load import load
from atoll.config.schema import RunConfig
from atoll.config.shared import flatten, nested, settings_digest
from atoll.dashboard.console import EventPrinter
from atoll.errors import AtollError, ConfigError
from atoll.events import EventLog, JsonLinesSink, RunEnded, RunStarted
from atoll.membership.etcd_place import SCHEME, EtcdPlace, parse_place
from atoll.membership.settings import CoordinatorSettings, Timeouts
from atoll.network.addresses import EVERYWHERE
from atoll.network.own_addresses import name_for_others, way_out
from atoll.plan.planner import choose
from atoll.signals import SIGNALS


def coordinator(
    run_toml: Annotated[Path | None, Parameter(help="The run's settings; without: the first peer's.")] = None,
    /,
    *,
    bind: Annotated[str, Parameter(help="host:port to listen on; port 0: any free one.")] = "127.0.0.1:7070",
    run: Annotated[str | None, Parameter(help="The run's name, where no RUN.toml gives it.")] = None,
    set_: Assignments = None,
    token_file: TokenFile = None,
    new: Annotated[
        bool,
        Parameter(help="Make the run's authority and its first tokens; then everything is TLS.", negative=""),
    ] = False,
    tokens_for: Annotated[
        str, Parameter(help="With --new: how long the join token lasts, e.g. 12h or 7d; 0: for ever.")
    ] = "7d",
    authority_file: Annotated[
        Path | None,
        Parameter(
            help="The authority's key and certificate. Default: authority.pem in OUT, if it is there.",
            show_default=False,
        ),
    ] = None,
    journal: Annotated[
        str | None,
        Parameter(
            help="Journal file, or etcd://HOST:PORT,HOST:PORT/PREFIX. Default: coordinator.journal in OUT."
        ),
    ] = None,
    advertise: Annotated[
        str,
        Parameter(
            help="Address by which others reach this machine, to be shown to them. Default: from --bind.",
            show_default=False,
        ),
    ] = "",
    out: Annotated[Path | None, Parameter(help="Folder for events and journal. Default: runs/NAME.")] = None,
) -> int:
    """Coordinate one run: admit peers, start rounds, count votes. Ends when the run is over.

    Started again with the same journal it goes on where it was; peers wait for it and reconnect. With a
    RUN.toml it holds the run's settings, and peers that differ are refused; without, the first peer's hold.

    With its journal in etcd it outlives its machine: start the same command on two or three machines. One leads;
    the others stand by, and one of them takes over once the leader was silent for membership.lease_s. Give peers
    all their addresses, separated by commas. More in docs/high-availability.md.

    --new makes the run: an authority (OUT/authority.pem) and two tokens, one to join and one to give orders. It prints
    the join line with the authority's fingerprint; from then on every connection of the run is TLS, and who has no
    certificate of this authority gets nothing. Started again, without --new, it goes on with the same authority.
    Without an authority nothing is encrypted and one ATOLL_TOKEN lets in; that is allowed on loopback, or inside a VPN
    that net.vpn names. More in docs/trust.md.

    Try:

        atoll coordinator recipes/three-clouds.toml --bind 0.0.0.0:7070 --new
        ATOLL_TOKEN=... atoll coordinator --run my-run --set membership.start_peers=2
        atoll coordinator run.toml --bind 0.0.0.0:7070 --journal etcd://10.0.0.1:2379,10.0.0.2:2379

    Exit codes: 0 the run is over; 2 config; 3 port or journal in use; 4 no etcd; 5 no token; 6 quorum lost;
    130/143 stopped.
    """
    config = _config(run_toml, run, set_ or [])
    folder = out or Path(config.local.out) / config.run.name
    host, port = parse_address("--bind", bind)
    trusted = open_trust(
        config, host, authority_file or folder / AUTHORITY, new=new, join_for_s=_span(tokens_for)
    )
    token = run_token(token_file) if trusted is None else b""
    flat = flatten(config) if run_toml else None
    console = Console(highlight=False)
    kept_in = _journal(journal, config, folder)
    if trusted and trusted.secrets and isinstance(kept_in, Path) and kept_in.exists():
        raise ConfigError(
            f"{kept_in} is the journal of a run that has begun, and its authority is not in "
            f"{authority_file or folder / AUTHORITY}: put that back, or begin another run with another --out"
        )
    publisher = publisher_of(config, trusted.authority if trusted else None, advertise, console)
    if trusted is not None:
        trusted.keep()
    sink = JsonLinesSink(folder / "coordinator.jsonl")
    events = EventLog("coordinator", sink, EventPrinter(console), *([publisher] if publisher else []))
    log.to_stderr("WARNING")
    from atoll.membership.server import serve  # the web server is slow to import; no other command needs it

    async def serve_until_stopped() -> tuple[int, str]:
        stop, stopped_by = asyncio.Event(), _stop_on_signals(asyncio.get_running_loop())
        waiting = asyncio.create_task(_relay(stopped_by, stop))
        try:
            code, reason = await serve(
                settings_of(config),
                host=host,
                port=port,
                token=token,
                trust=trusted.trust if trusted else None,
                first_tokens=trusted.first_tokens if trusted else (),
                new_run=bool(trusted and trusted.secrets),
                journal_path=kept_in,
                run_settings=flat,
                nested_settings=nested(config) if run_toml else None,
                events=events,
                make_lanes=choose,
                ready=lambda ready_host, ready_port: _say_how_to_join(
                    console,
                    config,
                    ready_host,
                    ready_port,
                    advertise,
                    shared=not isinstance(kept_in, Path),
                    trusted=trusted,
                ),
                stop=stop,
                advertise=advertise or (name_for_others() if host in EVERYWHERE else ""),
            )
        finally:
            waiting.cancel()
        return (128 + stopped_by.result(), reason) if stopped_by.done() else (code, reason)

    code, reason = 1, "it failed"
    try:
        digest = settings_digest(flat) if flat else ""
        events.emit(RunStarted("coordinator", config.run.name, digest, os.getpid()))
        code, reason = asyncio.run(serve_until_stopped())
        return code
    except (Stopped, AtollError) as error:
        code, reason = error.exit_code, str(error)
        raise
    finally:
        try:
            events.emit(RunEnded(reason=reason, exit_code=code))
        finally:
            sink.close()
            if publisher is not None:
                publisher.close()


def settings_of(config: RunConfig) -> CoordinatorSettings:
    """What the coordinator decides by."""
    held, net = config.membership, config.net
    waits = {name: getattr(held, name) for name in Timeouts.__struct_fields__ if hasattr(held, name)}
    return CoordinatorSettings(
        run=config.run.name,
        start_peers=held.start_peers,
        min_peers=held.min_peers,
        policy=held.policy,
        max_attempts=held.max_attempts,
        norm_limit=held.norm_limit,
        max_seconds=config.run.max_seconds,
        topology=net.topology,
        connections=0 if net.connections == "auto" else net.connections,
        lease_s=held.lease_s,
        save_rounds=config.checkpoint.every_rounds,
        save_s=config.checkpoint.every_s,
        timeouts=Timeouts(**waits, progress_timeout_s=net.progress_timeout_s),
    )


def _config(run_toml: Path | None, run: str | None, assignments: list[str]) -> RunConfig:
    if run_toml is None and run is None:
        raise ConfigError("no run: give a RUN.toml, or a name with --run NAME")
    return load(run_toml, [*([f"run.name={run}"] if run else []), *assignments])


def _journal(given: str | None, config: RunConfig, folder: Path) -> Path | EtcdPlace:
    """Where the journal is kept. Raises ConfigError, also for a lease that does not go with the other waits."""
    if given is None or not given.startswith(SCHEME):
        return Path(given) if given else folder / "coordinator.journal"
    held = config.membership
    if held.lease_s < 2 * held.heartbeat_s:
        raise ConfigError(
            f"membership.lease_s = {held.lease_s} is below 2 x heartbeat_s = {2 * held.heartbeat_s}: raise it, "
            "so that the leader can renew its lease in time"
        )
    if held.coordinator_lost_s <= held.lease_s + held.dead_s:
        raise ConfigError(
            f"membership.coordinator_lost_s = {held.coordinator_lost_s} must be above lease_s + dead_s = "
            f"{held.lease_s + held.dead_s}: peers have to wait until another coordinator leads"
        )
    return parse_place(given, config.run.name)


def _span(text: str) -> float:
    return 0.0 if text.strip() == "0" else parse_duration(text, "--tokens-for")


def _say_how_to_join(
    console: Console,
    config: RunConfig,
    host: str,
    port: int,
    advertise: str,
    *,
    shared: bool,
    trusted: Trusted | None,
) -> None:
    """`shared`: other coordinators may lead this run too."""
    hosts = [each.strip() for each in advertise.split(",") if each.strip()]
    if not hosts:
        hosts = [way_out() or name_for_others()] if host in EVERYWHERE else [host]
    reach = ",".join(each if _has_port(each) else join_address(each, port) for each in hosts)
    count = config.membership.start_peers
    lines = [
        f"run {config.run.name}: listening on {join_address(host, port)}; begins with {count} "
        f"peer{'s' * (count != 1)}",
        join_line(reach, config.run.name, trusted.fingerprint if trusted else ""),
        TOKEN_LINE,
    ]
    if trusted is None and host not in LOOPBACK:
        lines.append(
            f"      NOTHING IS ENCRYPTED: net.security is off, and all relies on the VPN {config.net.vpn!r}"
        )
    if trusted is not None:
        lines += trusted.lines
    if shared:
        lines.append("      and the other coordinators' addresses after this one, separated by commas")
    print_lines(console, lines)


def _has_port(host: str) -> bool:
    """An IPv6 address without brackets has none, however many colons it has."""
    return host.count(":") == 1 or "]:" in host


def _stop_on_signals(loop: asyncio.AbstractEventLoop) -> asyncio.Future[int]:
    """Set to the first signal; the second ends the process at once."""
    first: asyncio.Future[int] = loop.create_future()

    def stop(signum: signal.Signals) -> None:
        for each in SIGNALS:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        first.set_result(signum)

    for signum in SIGNALS:
        loop.add_signal_handler(signum, stop, signum)
    return first


async def _relay(first: asyncio.Future[int], stop: asyncio.Event) -> None:
    with suppress(asyncio.CancelledError):
        await asyncio.shield(first)
        stop.set()
