"""What the schema knows, by dotted name: for suggestions, for environment variables and for text values."""

from __future__ import annotations

import difflib
from functools import cache

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from atoll.config.schema import RunConfig, StageSection
from atoll.config.toml_lines import KeyPath


@cache
def sections() -> dict[str, dict[str, FieldInfo]]:
    """The fields of every table of RUN.toml."""
    found = {}
    for name, field in RunConfig.model_fields.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, BaseModel)
        found[name] = dict(field.annotation.model_fields)
    return found


@cache
def dotted_names() -> tuple[str, ...]:
    """Every `section.key`."""
    return tuple(f"{section}.{key}" for section, fields in sections().items() for key in fields)


def dotted(path: KeyPath) -> str:
    """`("outer", "inner_steps", 0, "lr")` as `outer.inner_steps[0].lr`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def takes_text(path: KeyPath) -> bool:
    """Whether the value at this path is a string, so that `--set run.name=7` means "7"."""
    if len(path) != 2:
        return False
    field = sections().get(str(path[0]), {}).get(str(path[1]))
    return field is not None and field.annotation is str


def suggestion(path: KeyPath) -> str | None:
    """The dotted name that was probably meant by an unknown path, if any comes near."""
    *parents, name = path
    if not parents:
        close = difflib.get_close_matches(str(name), sections(), n=1)
        if close:
            return close[0]
        return next((known for known in dotted_names() if known.split(".")[1] == name), None)
    siblings = StageSection.model_fields if len(parents) > 1 else sections().get(str(parents[0]), {})
    elsewhere = [known for known in dotted_names() if known.split(".")[1] == name]
    close = difflib.get_close_matches(str(name), siblings, n=1, cutoff=0.8 if elsewhere else 0.6)
    if close:
        return dotted((*parents, close[0]))
    near = elsewhere or difflib.get_close_matches(dotted(path), dotted_names(), n=1, cutoff=0.75)
    return near[0] if near else None
