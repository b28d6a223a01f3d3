"""`atoll config show` and `atoll config schema`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from atoll.cli.options import Assignments
from atoll.cli.output import deliver
from atoll.config.dump import to_toml
from atoll.config.load import load
from atoll.config.schema import RunConfig


def show(
    run_toml: Annotated[Path | None, Parameter(help="A RUN.toml; without one: the defaults.")] = None,
    /,
    *,
    set_: Assignments = None,
) -> int:
    """Print the settings that a RUN.toml resolves to, defaults, ATOLL_ variables and --set included.

    All mistakes are reported at once, with their lines.

    Try:

        atoll config show recipes/laptop.toml --set outer.inner_steps=50
    """
    deliver(to_toml(load(run_toml, set_ or [])))
    return 0


def schema() -> int:
    """Print the JSON Schema of RUN.toml, for editors: every key, its type, bounds, default and meaning."""
    deliver(json.dumps(RunConfig.model_json_schema(), indent=2) + "\n")
    return 0
