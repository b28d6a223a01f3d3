"""`atoll bench link`: what the network gives to plain TCP, by number of connections."""

from __future__ import annotations

import random
import statistics
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console

from atoll.cli.bench.crew import Crew
from atoll.cli.bench.measure import WITHIN_S, Bench
from atoll.cli.bench.messages import Echo, Took
from atoll.cli.bench.options import Join, Json, Listen, crew_of, join_instead
from atoll.cli.bench.report import json_rows, table_of
from atoll.cli.options import TokenFile
from atoll.cli.output import deliver
from atoll.errors import ConfigError

ECHOES = 20
MAX_STREAMS = 64


class LinkRow(msgspec.Struct, frozen=True, kw_only=True):
    """Plain TCP, both ways at once. `bytes_per_s` is of one direction."""

    connections: int
    seconds: float
    bytes_sent: int
    bytes_per_s: float
    cpu_s: float
    rtt_s: float


def link(
    *,
    mb: Annotated[float, Parameter(help="Megabytes that each side sends in a turn.")] = 100.0,
    connections: Annotated[
        list[int] | None,
        Parameter(
            help="How many connections share them. May be repeated. Default: 1, 2, 4, 8, 16.",
            negative="",
            show_default=False,
        ),
    ] = None,
    turns: Annotated[int, Parameter(help="How often, after once that does not count.")] = 3,
    seed: Annotated[int, Parameter(help="Of the order of turns.")] = 0,
    json: Json = False,
    listen: Listen = None,
    join: Join = None,
    token_file: TokenFile = None,
) -> int:
    """Time plain TCP between two members, both ways at once: round trip, and rate by number of connections.

    More connections help where one cannot fill the path: small buffers, long round trips, loss. The split is
    equal, so the slowest connection counts; the engine itself gives chunks to whichever is free.

    Try:

        atoll bench link
        atoll bench link --listen 0.0.0.0:7071        (and elsewhere: atoll bench link --join HOST:7071)

    With --json: a list of rows: connections, seconds (median), bytes_sent, bytes_per_s, cpu_s, rtt_s.

    Exit codes: 0 done; 2 usage; 3 this machine, or a member failed; 4, 5 joining.
    """
    if join is not None:
        return join_instead(join, token_file)
    streams = connections or [1, 2, 4, 8, 16]
    if mb <= 0 or turns < 1 or not all(1 <= count <= MAX_STREAMS for count in streams):
        raise ConfigError(f"--mb and --turns are above 0, and --connections is from 1 to {MAX_STREAMS}")
    console = Console(stderr=json, highlight=False)
    num_bytes = int(mb * 1e6)
    with crew_of(2, listen, token_file, console.print) as crew:
        crew.meet()
        rtt_s = round_trip_s(crew)
        bench = Bench(crew, random.Random(seed))
        contenders = [bench.sockets(str(count), num_bytes, count) for count in streams]
        bench.measure(contenders, turns)
    rows = [
        LinkRow(
            connections=count,
            seconds=contender.seconds,
            bytes_sent=num_bytes,
            bytes_per_s=num_bytes / contender.seconds,
            cpu_s=contender.cpu_s,
            rtt_s=rtt_s,
        )
        for count, contender in zip(streams, contenders, strict=True)
    ]
    if json:
        json_rows(rows)
        return 0
    lines = [
        (str(row.connections), f"{row.seconds:.3f}", f"{row.bytes_per_s * 8e-9:.3f}", f"{row.cpu_s:.3f}")
        for row in rows
    ]
    columns = ("connections", "seconds", "Gbit/s", "CPU s")
    table = table_of(f"plain TCP between two, both ways at once, {mb:g} MB each", columns, lines)
    deliver(f"{table}\nround trip {rtt_s * 1e3:.2f} ms; Gbit/s each way; CPU s per member\n")
    return 0


def round_trip_s(crew: Crew) -> float:
    """Median of a few round trips of one byte between the first two members."""
    asked = Echo(target=1, count=ECHOES, answer=False)
    answered = Echo(target=0, count=ECHOES, answer=True)
    return statistics.median(crew.ask([asked, answered], Took, WITHIN_S)[0].round_trips_s)
