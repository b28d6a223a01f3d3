"""Writing a config as TOML: the resolved settings that every run folder keeps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.config.schema import RunConfig


def toml_value(value: Any) -> str:
    """One value in TOML's spelling."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        pairs = (f"{key} = {toml_value(item)}" for key, item in value.items() if item is not None)
        return "{ " + ", ".join(pairs) + " }"
    return repr(value)


def to_toml(config: RunConfig) -> str:
    """The whole config, defaults included; reading it back gives an equal config."""
    tables = []
    for section, keys in config.model_dump().items():
        lines = [f"{key} = {toml_value(value)}" for key, value in keys.items() if value is not None]
        tables.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(tables) + "\n"


def write_resolved(config: RunConfig, path: Path) -> str:
    """Write the config; returns the SHA-256 (hex) of the file."""
    text = to_toml(config).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return hashlib.sha256(text).hexdigest()
