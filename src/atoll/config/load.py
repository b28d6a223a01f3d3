"""From a RUN.toml, the environment and `--set a.b=c` to a `RunConfig`; all mistakes are reported at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from atoll.config.complaints import complaints
from atoll.config.environment import settings_variables
from atoll.config.layers import Layers
from atoll.config.schema import RunConfig
from atoll.config.shared import OWN_KEYS, from_flat, is_own
from atoll.errors import ConfigError


def load_joined(settings: Mapping[str, Any], assignments: Iterable[str] = ()) -> RunConfig:
    """The config of a peer that joins a run by its line: the run's settings, as the coordinator gave them, and this
    machine's own: ATOLL_LOCAL_ and ATOLL_DHT_ variables, and `assignments` to keys that are each peer's own.

    Raises ConfigError for other assignments: they are the run's.
    """
    assignments = tuple(assignments)
    foreign = [text for text in assignments if not is_own(text.partition("=")[0].strip())]
    if foreign:
        raise ConfigError(
            f"--set {foreign[0]}: this belongs to the run, which has settled it; a peer that joins may set "
            f"{', '.join(sorted(OWN_KEYS))}, local.* and dht.*"
        )
    layers = Layers()
    flat = any("." in key for key in settings)
    layers.add_settings(from_flat(settings) if flat else settings, "the run")
    layers.add_variables(
        {name: value for name, value in settings_variables(None).items() if value[0][0] in ("local", "dht")}
    )
    layers.add_assignments(assignments)
    return _validated(layers)


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
    return _validated(layers)


def _validated(layers: Layers) -> RunConfig:
    try:
        return RunConfig.model_validate(layers.values)
    except ValidationError as error:
        found = complaints(error.errors(include_url=False), layers)
        raise ConfigError("\n".join(found)) from None
