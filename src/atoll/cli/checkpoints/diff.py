"""`atoll checkpoints diff`: how far two checkpoints are from each other."""

from __future__ import annotations

from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from atoll.checkpoint.choosing import choose
from atoll.checkpoint.difference import Difference, ParameterDifference, difference
from atoll.cli.checkpoints.options import Checkpoint, Json
from atoll.cli.output import deliver
from atoll.errors import ConfigError
from atoll.state.manifest import VECTORS


def diff(
    a: Checkpoint,
    b: Checkpoint,
    /,
    *,
    vector: Annotated[
        str, Parameter(help="anchor (the weights), or velocity (the outer momentum).")
    ] = "anchor",
    top: Annotated[int, Parameter(help="How many parameters to show, the farthest first; 0: all.")] = 10,
    json: Json = False,
) -> int:
    """Compare two checkpoints of one model, parameter by parameter.

    Try:

        atoll checkpoints diff runs/laptop@100 runs/laptop@120
        atoll checkpoints diff runs/a runs/b --top 0 --vector velocity

    --json prints one object: a, b, vector, total and parameters (name, shape, norm of a - b, relative to the norm of b,
    largest element, differing elements).

    Exit codes: 0 compared, whether or not they differ; 2 usage, or two different models; 3 damaged or missing.
    """
    chosen = next((each for each in VECTORS if each == vector), None)
    if chosen is None:
        raise ConfigError(f"--vector {vector}: it is one of {', '.join(VECTORS)}")
    found = difference(choose(a), choose(b), chosen)
    if json:
        deliver(msgspec.json.encode(found).decode() + "\n")
        return 0
    total = found.total
    if not total.differing:
        deliver(f"{found.a} and {found.b} have the same {found.vector}, to the bit\n")
        return 0
    Console(highlight=False).print(_table(found, top))
    deliver(
        f"{total.differing} of {total.shape[0]} elements differ; norm {total.norm:.4g}, relative {total.relative:.3g}\n"
    )
    return 0


def _table(found: Difference, top: int) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(found.vector)
    for name in ("shape", "norm of a - b", "relative", "largest"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = sorted(found.parameters, key=_rank)
    for row in rows[: top or len(rows)]:
        shape = " x ".join(map(str, row.shape))
        table.add_row(row.name, shape, f"{row.norm:.4g}", f"{row.relative:.3g}", f"{row.largest:.3g}")
    return table


def _rank(row: ParameterDifference) -> tuple[float, str]:
    return -row.relative, row.name
