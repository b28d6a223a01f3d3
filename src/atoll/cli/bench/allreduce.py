"""`atoll bench allreduce`: the engine's all-reduce, beside its bound and beside what others use."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from atoll.cli.bench.bounds import even_links, payload_rate
from atoll.cli.bench.measure import Bench, all_reduce_rows
from atoll.cli.bench.options import (
    Codecs,
    Join,
    Json,
    Listen,
    check_world,
    counts,
    crew_of,
    join_instead,
    read_tls,
)
from atoll.cli.bench.plans import TOPOLOGIES, Recipe, check_codec, check_topology, members_of
from atoll.cli.bench.report import all_reduce_table, footnote, json_rows
from atoll.cli.bench.rivals import check_rivals
from atoll.cli.options import TokenFile
from atoll.cli.output import deliver
from atoll.errors import ConfigError


def allreduce(
    *,
    world: Annotated[int, Parameter(help="How many members, each a process.")] = 2,
    numel: Annotated[
        list[str] | None,
        Parameter(
            help="fp32 values to reduce, e.g. 25M. May be repeated. Default: 25M.",
            negative="",
            show_default=False,
        ),
    ] = None,
    codec: Codecs = None,
    topology: Annotated[str, Parameter(help=f"Which lanes: {', '.join(TOPOLOGIES)}.")] = "auto",
    connections: Annotated[int, Parameter(help="TCP connections of a pair; 0: the plan's own number.")] = 0,
    chunk_kb: Annotated[int, Parameter(help="Bytes of a chunk, in kB of 1024; 0: the plan's own.")] = 0,
    turns: Annotated[
        int, Parameter(help="How often each takes its turn, after one that does not count.")
    ] = 5,
    compare: Annotated[
        list[str] | None,
        Parameter(
            help="Also time this, by turns with ours: gloo, hivemind. May be repeated.",
            negative="",
            show_default=False,
        ),
    ] = None,
    mbit: Annotated[
        float,
        Parameter(help="Every member's rate each way in Mbit/s, if known: the bound is computed from it."),
    ] = 0.0,
    rtt_ms: Annotated[float, Parameter(help="The round trip that goes with --mbit.")] = 0.0,
    tls: Annotated[
        Path | None,
        Parameter(
            help="Folder with node.pem, node.key, ca.pem: also time each codec over TLS.", show_default=False
        ),
    ] = None,
    seed: Annotated[int, Parameter(help="Of the values, and of the order of turns.")] = 0,
    json: Json = False,
    listen: Listen = None,
    join: Join = None,
    token_file: TokenFile = None,
) -> int:
    """Time an all-reduce of fp32 values: encode, send, sum, receive, decode, in real processes over TCP.

    On this machine, or between machines: one says --listen HOST:PORT and everything else, the others say only
    --join HOST:PORT; all share a token (ATOLL_TOKEN). Everything that is compared takes turns in one call.

    Try:

        atoll bench allreduce --codec int8 --codec fp32 --compare gloo
        atoll bench allreduce --world 4 --numel 100M --turns 3 --json
        atoll bench allreduce --world 2 --listen 0.0.0.0:7071        (and elsewhere: --join HOST:7071)

    With --json: a list of rows, one for each codec and size: codec, tls, topology, connections, world, numel,
    turns, seconds (median over the turns, of the slowest member), seconds_min, seconds_max, wire_s, cpu_s
    (per member), bytes_sent (at the sockets, busiest member), bytes_formula, extra_bytes (memory beyond the
    caller's buffers), wire_bytes (of one vector), lower_bound_s, bound, ratio, rel_error, equal (all members
    hold the same bits), speedup and compared (for each --compare), predicted_s and reason (the plan's).

    Exit codes: 0 done; 2 usage; 3 this machine, or a member failed; 4, 5 joining; 7 members differ.
    """
    if join is not None:
        return join_instead(join, token_file)
    recipes = [
        Recipe(check_codec(name), check_topology(topology), connections, chunk_kb * 1024)
        for name in ",".join(codec or ["int8"]).split(",")
    ]
    certificates = read_tls(tls, listen)
    if certificates is not None:
        recipes = [twin for recipe in recipes for twin in (recipe, replace(recipe, tls=True))]
    numels = counts("--numel", numel or ["25M"])
    rivals = ",".join(compare).split(",") if compare else []
    check_rivals(rivals)
    check_world(world, connections)
    if turns < 1 or connections < 0 or chunk_kb < 0 or mbit < 0 or rtt_ms < 0:
        raise ConfigError(
            "--turns is at least 1; --connections, --chunk-kb, --mbit and --rtt-ms are not negative"
        )
    console = Console(stderr=json, highlight=False)
    links = even_links(members_of(world), payload_rate(mbit), rtt_ms / 1e3) if mbit else ()
    with crew_of(world, listen, token_file, console.print, certificates) as crew:
        crew.meet(rivals)
        bench = Bench(crew, random.Random(seed), links)
        rows = list(
            all_reduce_rows(bench, recipes, numels, rivals=rivals, turns=turns, seed=seed, links=links)
        )
    if json:
        json_rows(rows)
    else:
        deliver(f"{all_reduce_table(rows)}\n{footnote(rows)}\n")
    return 0
