"""The settings that all peers of a run must have in common, in the forms that are sent and compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from atoll.config.schema import RunConfig

Scalar = str | int | float | bool | None

# All that changes the shared state. [membership] and [eval] do not, and the first is the coordinator's alone.
COMPARED = ("run", "model", "data", "inner", "outer")
# Where a peer keeps its copy of the text is its own affair; that it is the same text is compared by content.
_OWN = {"data.sources"}


def flatten(config: RunConfig) -> dict[str, Scalar]:
    """The compared settings as `section.key`, lists as `section.key.0`; peers that differ are refused."""
    dumped = config.model_dump(include=set(COMPARED))
    flat = {
        name: value for name, value in _leaves("", dumped) if name not in _OWN and not _inside(name, _OWN)
    }
    flat["data.tokenizer"] = PurePath(config.data.tokenizer).name
    return flat


def nested(config: RunConfig) -> dict[str, Any]:
    """The run's settings as a newcomer receives them: everything but `[local]`, in plain JSON types."""
    return config.model_dump(mode="json", exclude={"local"})


def settings_digest(flat: Mapping[str, Scalar]) -> str:
    """SHA-256 (hex) of flat settings, independent of their order."""
    return hashlib.sha256(json.dumps(dict(flat), sort_keys=True).encode()).hexdigest()


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Scalar]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{prefix}.{key}" if prefix else key, item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(f"{prefix}.{index}", item)
    else:
        yield prefix, value


def _inside(name: str, tables: set[str]) -> bool:
    return any(name.startswith(f"{table}.") for table in tables)
