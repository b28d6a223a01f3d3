"""`atoll checkpoints ls`: what a place holds."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from atoll.checkpoint.choosing import place_of
from atoll.checkpoint.survey import Row, survey, unfinished
from atoll.cli.checkpoints.options import Json, Place
from atoll.cli.output import deliver


def ls(place: Place, /, *, json: Json = False) -> int:
    """List the checkpoints of a run: version, step, size, which one is `latest`, and whose own parts lie beside it.

    Manifests are read and sizes compared; `atoll checkpoints verify` reads every byte.

    Try:

        atoll checkpoints ls runs/laptop
        atoll checkpoints ls runs/laptop --json

    --json prints one object: place, versions (newest first: version, term, round, step, digest, size_bytes,
    saved_s since 1970, latest, peers, problem) and unfinished (what a killed writer left; the next save removes it).

    Exit codes: 0 done; 2 usage; 3 there are no checkpoints.
    """
    found = place_of(Path(place))
    rows, left = survey(found), unfinished(found)
    if json:
        said = {"place": str(found.path), "versions": rows, "unfinished": left}
        deliver(msgspec.json.encode(said).decode() + "\n")
        return 0
    console = Console(highlight=False)
    console.print(_table(rows), soft_wrap=False)
    for row in rows:
        if row.problem:
            console.print(f"version {row.version}: {row.problem}", soft_wrap=True, markup=False)
    if left:
        console.print(f"{len(left)} unfinished, of writers that died: the next save removes them")
    return 0


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name, right in (
        ("version", True),
        ("step", True),
        ("size", True),
        ("saved", False),
        ("digest", False),
    ):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    table.add_column("")
    table.add_column("own parts of")
    for row in rows:
        state = "latest" if row.latest else ""
        table.add_row(
            str(row.version),
            "" if row.problem else str(row.step),
            size_text(row.size_bytes),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.saved_s)),
            row.digest[:12],
            "damaged" if row.problem else state,
            ", ".join(row.peers),
        )
    return table


def size_text(size_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"
