"""A run that trains within seconds: its RUN.toml, and twenty short documents beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {
    "model": {
        "dim": 32,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "ffn_dim": 64,
        "max_seq_len": 32,
    },
    "data": {"seq_len": 32, "val_fraction": 0.2},
    "inner": {"batch_size": 4},
    "outer": {"inner_steps": 10},
    "local": {"threads": 1},
}
FOR_EVER = 1_000_000


def write_small_run(folder: Path, name: str, more: Mapping[str, object], *, steps: int = FOR_EVER) -> Path:
    """`folder/run.toml`, with `folder/text`; `more` are further settings, as `section.key`."""
    text = folder / "text"
    text.mkdir()
    for index in range(20):
        (text / f"{index}.txt").write_text(f"document {index} " * 200)
    settings = {"run": {"name": name, "steps": steps}, **{key: dict(held) for key, held in SETTINGS.items()}}
    settings["data"]["sources"] = [str(text)]
    for dotted, value in more.items():
        section, key = dotted.split(".")
        settings.setdefault(section, {})[key] = value
    tables = (
        "\n".join([f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in held.items())])
        for section, held in settings.items()
    )
    path = folder / "run.toml"
    path.write_text("\n\n".join(tables) + "\n")
    return path
