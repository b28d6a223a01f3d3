"""The settings that all peers of a run must have in common, in the forms that are sent and compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from atoll.config.keys import dotted_names
from atoll.config.schema import RunConfig

Scalar = str | int | float | bool | None

# All that changes the shared state. [membership], [net] and [eval] do not; the first is the coordinator's alone.
COMPARED = ("run", "model", "data", "inner", "outer")
# A name for other keys, which are compared: who writes a shape out and who names it run the same model.
_NAMES = {"model.size"}
# Where a peer keeps its copy of the text, of the model or of the start weights is its own affair; that they are equal
# is compared by content.
_OWN = {"data.sources", "data.shards", "data.cache", "model.init_from", "model.hf"}
OWN_KEYS = frozenset(
    {*_OWN, "net.max_up", "net.max_down", "net.congestion", "checkpoint.path", "checkpoint.staging"}
)


def flatten(config: RunConfig) -> dict[str, Scalar]:
    """The compared settings as `section.key`, lists as `section.key.0`; peers that differ are refused."""
    dumped = config.model_dump(include=set(COMPARED))
    left_out = _OWN | _NAMES
    flat = {
        name: value
        for name, value in _leaves("", dumped)
        if name not in left_out and not _inside(name, left_out)
    }
    flat["data.tokenizer"] = PurePath(config.data.tokenizer).name
    return flat


def nested(config: RunConfig) -> dict[str, Any]:
    """The run's settings as a newcomer receives them, in plain JSON types: all but what is each peer's own."""
    return config.model_dump(
        mode="json",
        exclude={
            "local": True,
            "dht": True,
            "net": {"max_up", "max_down", "congestion", "security", "vpn"},
            "checkpoint": {"path", "staging"},
        },
    )


def is_own(key: str) -> bool:
    """Whether `section.key` is each peer's own, not the run's."""
    return key.startswith(("local.", "dht.")) or key in OWN_KEYS


def from_flat(flat: Mapping[str, Scalar]) -> dict[str, Any]:
    """What `flatten` made flat, nested again: what a newcomer receives if the first peer defined the run.

    Keys that no RUN.toml has (digests) are left out.
    """
    known = {name for name in dotted_names() if name.partition(".")[0] in COMPARED}
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        section, key, *rest = name.split(".")
        if f"{section}.{key}" in known:
            _put(tree, (section, key, *rest), value)
    return _listed(tree)


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Scalar) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def _listed(value: Any) -> Any:
    """Tables whose keys are 0, 1, 2, ... are lists."""
    if not isinstance(value, dict):
        return value
    items = {key: _listed(item) for key, item in value.items()}
    return list(items.values()) if items and all(key.isdigit() for key in items) else items


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
