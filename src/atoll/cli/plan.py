"""`atoll plan`: what a run will need and take, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from atoll.cli.link_rates import even_rates, read_rates
from atoll.cli.options import Assignments, RunFile
from atoll.cli.output import deliver
from atoll.config.load import load
from atoll.config.schema import RunConfig
from atoll.dashboard.words import bytes_text, counted
from atoll.errors import ConfigError
from atoll.values import LinkRate

if TYPE_CHECKING:
    from atoll.plan.memory import Item
    from atoll.train.sizes import PeerSizes

_MOST_PEERS, _MOST_RANKS = 1000, 1024
_FEW = 12
"""So many peers' bytes are listed; of more, the least and the most."""


class _Bill(msgspec.Struct, frozen=True):
    """`items` in bytes; `estimated` are the names of those that are not counted but estimated."""

    total_bytes: int
    items: dict[str, int]
    estimated: tuple[str, ...]


class _Moved(msgspec.Struct, frozen=True):
    sent_bytes: int
    received_bytes: int


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run's plan. Memory is the largest rank's; staging the peer's."""

    run: str
    parameters: int
    trained: int
    ranks: int
    largest_rank: int
    elements: int
    device: str
    codec: str
    memory_device: _Bill
    memory_host: _Bill
    memory_passing: _Bill
    memory_staging: _Bill
    vector_bytes: int
    moved: dict[str, _Moved]
    predicted_s: float
    topology: str
    reason: str


def plan(
    run_toml: RunFile,
    /,
    *,
    ranks: Annotated[int, Parameter(help="Ranks of a peer, each with a part of the model.")] = 1,
    peers: Annotated[
        int | None,
        Parameter(help="How many peers. Default: as many as the run begins with.", show_default=False),
    ] = None,
    up: Annotated[
        str,
        Parameter(
            help='What each peer sends at most, e.g. "200 Mbit/s". Default: net.max_up.', show_default=False
        ),
    ] = "",
    down: Annotated[
        str, Parameter(help="What each takes in at most. Default: net.max_down.", show_default=False)
    ] = "",
    rtt: Annotated[
        float,
        Parameter(help="Round trip between two peers in milliseconds. Default: 50.", show_default=False),
    ] = 0.0,
    rates: Annotated[
        Path | None, Parameter(help="TOML file with the rates of each peer.", show_default=False)
    ] = None,
    set_: Assignments = None,
    json: Annotated[
        bool, Parameter(help="Print one JSON object on stdout, and nothing else.", negative="")
    ] = False,
) -> int:
    """Show what a run will need, before anything starts: memory per rank, bytes and seconds per round.

    Nothing is built, read or sent. Memory is that of the largest rank: FSDP2 cuts by rows, and they need not be even.
    What is marked ~ is an estimate, all else is counted. Bytes are those of the plan that the coordinator would make
    on these rates. A peer that has less room than is counted here is refused when it starts.

    Try:

        atoll plan recipes/three-clouds.toml --up "200 Mbit/s" --rtt 80
        atoll plan recipes/three-clouds.toml --ranks 8 --peers 4 --rates rates.toml --json

    The file of --rates has a table for each peer, and links that are worse than their ends' lines:

        rtt_ms = 80
        [peers.bern]
        up = "200 Mbit/s"
        down = "1 Gbit/s"
        [peers.oslo]
        up = "100 Mbit/s"
        [[links]]
        source = "bern"
        target = "oslo"
        rate = "50 Mbit/s"
        rtt_ms = 120
        loss = 0.001

    Exit codes: 0 done; 2 usage or config.
    """
    config = load(run_toml, set_ or [])
    if not 1 <= ranks <= _MOST_RANKS:
        raise ConfigError(f"--ranks {ranks}: a peer has 1 to {_MOST_RANKS}")
    members, links = _members(config, peers, rates, up, down, rtt)
    from atoll.train.sizes import peer_sizes  # torch takes seconds to import; mistakes above are told at once

    try:
        sizes = peer_sizes(config, num_ranks=ranks, members=members, links=links)
    except ValueError as error:
        raise ConfigError(f"--ranks {ranks}: {error}") from None
    report = _report(config, sizes)
    if json:
        deliver(msgspec.json.encode(report).decode() + "\n")
    else:
        _show(report, sizes, bool(links))
    return 0


def _members(
    config: RunConfig, peers: int | None, rates: Path | None, up: str, down: str, rtt_ms: float
) -> tuple[tuple[str, ...], tuple[LinkRate, ...]]:
    if rates is not None:
        if peers is not None or up or down or rtt_ms:
            raise ConfigError(
                "--rates names the peers and their rates: leave out --peers, --up, --down, --rtt"
            )
        return read_rates(rates)
    count = config.membership.start_peers if peers is None else peers
    if not 1 <= count <= _MOST_PEERS:
        raise ConfigError(f"--peers {count}: a run has 1 to {_MOST_PEERS}")
    members = tuple(f"peer-{number}" for number in range(count))
    up, down = up or config.net.max_up, down or config.net.max_down
    return members, even_rates(members, up, down, rtt_ms)


def _report(config: RunConfig, sizes: PeerSizes) -> _Report:
    largest, choice = sizes.largest, sizes.choice
    return _Report(
        run=config.run.name,
        parameters=sizes.parameters,
        trained=sizes.trained,
        ranks=sizes.num_ranks,
        largest_rank=largest.rank,
        elements=largest.elements,
        device=config.local.device,
        codec=config.outer.codec,
        memory_device=_bill(largest.device),
        memory_host=_bill(largest.host),
        memory_passing=_bill(largest.passing),
        memory_staging=_bill(sizes.staging),
        vector_bytes=sizes.wire_bytes,
        moved={name: _Moved(each.sent_bytes, each.received_bytes) for name, each in sizes.moved.items()},
        predicted_s=choice.predicted_s,
        topology=choice.topology,
        reason=choice.reason,
    )


def _bill(items: tuple[Item, ...]) -> _Bill:
    return _Bill(
        sum(item.num_bytes for item in items),
        {item.name: item.num_bytes for item in items},
        tuple(item.name for item in items if item.estimate),
    )


def _show(report: _Report, sizes: PeerSizes, given: bool) -> None:
    console = Console(highlight=False)
    which = f"; rank {report.largest_rank} has the most, {report.elements:,}" if report.ranks > 1 else ""
    trained = "" if report.trained == report.parameters else f", {report.trained:,} of them trained"
    lines = [
        f"run {report.run}: {report.parameters:,} parameters{trained}; {counted(report.ranks, 'rank')} a peer{which}",
        "",
    ]
    deliver("\n".join(lines) + "\n")
    console.print(_memory_table(report, sizes.on_cpu))
    deliver(f"\na round of {counted(len(report.moved), 'peer')} in {report.codec}\n")
    console.print(_wire_table(report))
    if len(report.moved) > 1:
        assumed = "" if given else "; give --up, --down and --rtt for your own"
        deliver(f"sync: {report.reason}{assumed}\n")


def _memory_table(report: _Report, on_cpu: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("memory, of a rank" if report.ranks > 1 else "memory", overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    device = "in RAM, by training (device cpu)" if on_cpu else f"on the device ({report.device})"
    places = (
        (device, report.memory_device),
        ("in RAM, by rounds" + (", and what rests there" if _rests(report) else ""), report.memory_host),
        ("in RAM, for a moment", report.memory_passing),
        ("staged by the peer (in RAM where checkpoint.staging is)", report.memory_staging),
    )
    for place, bill in places:
        if not bill.items:
            continue
        table.add_row(place, bytes_text(bill.total_bytes), style="bold")
        for name, num_bytes in bill.items.items():
            table.add_row(f"  {name}", ("~ " if name in bill.estimated else "") + bytes_text(num_bytes))
    return table


def _rests(report: _Report) -> bool:
    """Whether weights are in host memory while the device computes (local.cpu_offload)."""
    return "parameters" in report.memory_host.items


def _wire_table(report: _Report) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("peer", overflow="fold")
    table.add_column("sends", justify="right", no_wrap=True)
    table.add_column("receives", justify="right", no_wrap=True)
    rows = sorted(report.moved.items())
    if len(rows) > _FEW:
        by_sent = sorted(rows, key=lambda row: row[1].sent_bytes)
        rows = [("the least", by_sent[0][1]), ("the most", by_sent[-1][1])]
    for name, each in rows:
        table.add_row(name, bytes_text(each.sent_bytes), bytes_text(each.received_bytes))
    return table
