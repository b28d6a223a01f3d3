"""From a RUN.toml, the environment and `--set a.b=c` to a `RunConfig`; all mistakes are reported at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import ValidationError

from atoll.config.complaints import complaints
from atoll.config.environment import settings_variables
from atoll.config.layers import Layers
from atoll.config.schema import RunConfig
from atoll.errors import ConfigError


def load(
    path: str | Path | None, assignments: Iterable[str] = (), environ: Mapping[str, str] | None = None
) -> RunConfig:
    """The config of a run: the file (None: defaults), then ATOLL_ variables, then `assignments`; later wins.

    Raises ConfigError with a line per mistake, each beginning with where it is: `file:line`, `--set`, ...
    """
    layers = Layers()
    if path is not None:
        layers.add_file(Path(path))
    layers.add_variables(settings_variables(environ))
    layers.add_assignments(assignments)
    try:
        return RunConfig.model_validate(layers.values)
    except ValidationError as error:
        found = complaints(error.errors(include_url=False), layers)
        raise ConfigError("\n".join(found)) from None
