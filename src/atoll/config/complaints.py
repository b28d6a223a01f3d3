"""Pydantic's errors as our sentences: where, which value, what is wrong with it, and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from pydantic_core import ErrorDetails

from atoll.config.dump import toml_value
from atoll.config.keys import dotted, suggestion
from atoll.config.layers import Layers
from atoll.config.toml_lines import KeyPath

_WANTED: dict[str, str] = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text in quotes",
    "tuple_type": "must be a list in [ ]",
    "model_type": "must be a table",
}
# What says which kind of value belongs there; anything else is about a value of the right kind.
_KINDS = {*_WANTED, "literal_error"}
_BOUND: dict[str, tuple[str, str]] = {
    "greater_than": ("must be above", "gt"),
    "greater_than_equal": ("must be at least", "ge"),
    "less_than": ("must be below", "lt"),
    "less_than_equal": ("must be at most", "le"),
    "too_short": ("needs at least this many entries:", "min_length"),
    "too_long": ("takes at most this many entries:", "max_length"),
}


def complaints(errors: Iterable[ErrorDetails], layers: Layers) -> list[str]:
    """One line per mistake, in the order of the schema."""
    placed = [(_real_path(error["loc"], layers.values), error) for error in errors]
    return [_sentence(path, kinds, layers) for path, kinds in _one_per_place(placed).items()]


def _real_path(loc: tuple[str | int, ...], values: Any) -> KeyPath:
    """The place in the user's input: pydantic also names the branch of a union, which nobody wrote."""
    path: list[str | int] = []
    for part in loc:
        if isinstance(part, str) and re.search(r"[\[\-]", part) and not _holds(values, part):
            continue
        path.append(part)
        values = values[part] if _holds(values, part) else {}
    return tuple(path)


def _holds(values: Any, part: str | int) -> bool:
    if isinstance(values, dict):
        return part in values
    return isinstance(values, tuple) and isinstance(part, int) and part < len(values)


def _one_per_place(placed: list[tuple[KeyPath, ErrorDetails]]) -> dict[KeyPath, list[ErrorDetails]]:
    """Errors by place. Where one branch of a union got further than another, only the further one counts."""
    by_place: dict[KeyPath, list[ErrorDetails]] = {}
    for path, error in placed:
        by_place.setdefault(path, []).append(error)
    for path, errors in list(by_place.items()):
        if any(error["type"] not in _KINDS for error in errors):
            by_place[path] = [error for error in errors if error["type"] not in _KINDS]
        elif any(len(other) > len(path) and other[: len(path)] == path for other in by_place):
            del by_place[path]
    misspelt = {suggestion(path) for path, errors in by_place.items() if _is(errors, "extra_forbidden")}
    return {
        path: errors
        for path, errors in by_place.items()
        if not (_is(errors, "missing") and dotted(path) in misspelt)
    }


def _is(errors: list[ErrorDetails], kind: str) -> bool:
    return any(error["type"] == kind for error in errors)


def _sentence(path: KeyPath, errors: list[ErrorDetails], layers: Layers) -> str:
    error = errors[0]
    reason = str(error.get("ctx", {}).get("error", error["msg"]))
    if error["type"] == "value_error" and len(path) < 2:
        section = f"{path[0]}: " if path else ""
        return f"{_where_mentioned(path, reason, layers)}{section}{reason}"
    origin = layers.origin(path)
    where = f"{origin}: " if origin else ""
    name = dotted(path)
    if where.startswith("--set "):
        where = "--set "
    if error["type"] == "value_error":
        return f"{where}{name}: {reason}"
    if error["type"] == "missing":
        return f"{where}{name} is missing: give it a value"
    shown = "" if isinstance(error["input"], dict) else f" = {toml_value(error['input'])}"
    return f"{where}{name}{shown}: {_reason(path, errors)}"


def _reason(path: KeyPath, errors: list[ErrorDetails]) -> str:
    error = errors[0]
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(path)
    if kind == "string_pattern_mismatch":
        return "must be 1 to 64 letters, digits or any of . _ -, and begin with a letter or digit"
    if kind in _BOUND:
        words, key = _BOUND[kind]
        return f"{words} {context[key]:g}"
    wanted = [_wanted(each) for each in errors if each["type"] in _KINDS]
    if wanted:
        return " or ".join([wanted[0], *(words.removeprefix("must be ") for words in wanted[1:])])
    return error["msg"][:1].lower() + error["msg"][1:]


def _unknown(path: KeyPath) -> str:
    kind = "unknown table" if len(path) == 1 else "unknown key"
    meant = suggestion(path)
    return f"{kind}; did you mean {meant}?" if meant else f"{kind}; `atoll config show` lists all"


def _wanted(error: ErrorDetails) -> str:
    if error["type"] != "literal_error":
        return _WANTED[error["type"]]
    names = re.findall(r"'([^']*)'", str(error.get("ctx", {})["expected"]))
    close = difflib.get_close_matches(str(error["input"]), names, n=1)
    *others, last = (f'"{name}"' for name in names)
    listed = f"{', '.join(others)} or {last}" if others else last
    return f"must be {listed}" + (f'; did you mean "{close[0]}"?' if close else "")


def _where_mentioned(section: KeyPath, reason: str, layers: Layers) -> str:
    """A rule between keys names them; point at the first of them that the user wrote."""
    origins = []
    for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", reason):
        path: KeyPath = (*section, *word.split("."))
        if _reaches(path, layers.values):
            origins.append(layers.origin(path))
    given = [origin for origin in origins if origin]
    return f"{given[0]}: " if given else ""


def _reaches(path: KeyPath, values: Any) -> bool:
    for part in path:
        if not _holds(values, part):
            return False
        values = values[part]
    return True
