"""Raw settings from files, the environment and `--set`, merged; each value remembers where it came from."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from atoll.config.keys import takes_text
from atoll.config.toml_lines import KeyPath, key_lines
from atoll.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_AT_LINE = re.compile(r"\s*\(at line (\d+), column \d+\)")


class Layers:
    """Later layers win, key by key; lists are replaced as a whole."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._origins: dict[KeyPath, str] = {}

    def add_file(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be read or is no TOML."""
        text = _read(path)
        try:
            parsed = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(_syntax_message(path, text, str(error))) from None
        lines = key_lines(text)
        self._merge((), parsed, {where: f"{path}:{line}" for where, line in lines.items()}, str(path))

    def add_settings(self, settings: Mapping[str, Any], origin: str) -> None:
        """A run's settings as they were received."""
        self._merge((), dict(settings), {}, origin)

    def add_assignments(self, assignments: Iterable[str]) -> None:
        """`a.b=c` each. Raises ConfigError, naming all that are malformed."""
        bad = []
        for text in assignments:
            key, equals, raw = text.partition("=")
            key = key.strip()
            if not equals or not _BARE_KEY.fullmatch(key):
                bad.append(f"--set {text}: write it as section.key=value, e.g. --set outer.inner_steps=50")
                continue
            self.put(tuple(key.split(".")), raw.strip(), f"--set {key}")
        if bad:
            raise ConfigError("\n".join(bad))

    def add_variables(self, variables: Mapping[str, tuple[KeyPath, str]]) -> None:
        """Values of environment variables, by name: (path, text)."""
        for name, (path, raw) in variables.items():
            self.put(path, raw.strip(), name)

    def put(self, path: KeyPath, raw: str, origin: str) -> None:
        """One value written as TOML, or as plain text where it is none or a text is wanted."""
        value: Any = raw.strip("\"'") if takes_text(path) else _parse_value(raw)
        *parents, last = path
        table: dict[Any, Any] = {last: value}
        for key in reversed(parents):
            table = {key: table}
        self._merge((), table, {}, origin)

    def origin(self, path: KeyPath) -> str | None:
        """Where the value at this path, or the nearest table around it, was given; None for a default."""
        for end in range(len(path), 0, -1):
            if path[:end] in self._origins:
                return self._origins[path[:end]]
        return None

    def _merge(self, at: KeyPath, new: dict[str, Any], origins: Mapping[KeyPath, str], fallback: str) -> None:
        target: dict[Any, Any] = self.values
        for key in at:
            target = target[key]
        for key, value in new.items():
            path = (*at, key)
            origin = origins.get(path, fallback)
            if isinstance(value, dict) and isinstance(target.get(key, {}), dict):
                target.setdefault(key, {})
                self._origins.setdefault(path, origin)
                self._merge(path, value, origins, origin)
            else:
                self._forget(path)
                target[key] = _frozen(value)
                self._origins[path] = origin
                self._origins.update((p, o) for p, o in origins.items() if p[: len(path)] == path)

    def _forget(self, path: KeyPath) -> None:
        for known in [known for known in self._origins if known[: len(path)] == path]:
            del self._origins[known]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); a RUN.toml is UTF-8") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot read {path}: {reason}; give the path of a RUN.toml") from None


def _syntax_message(path: Path, text: str, error: str) -> str:
    at = _AT_LINE.search(error)
    line = int(at.group(1)) if at else text.count("\n") + 1
    reason = _AT_LINE.sub("", error).replace(" (at end of document)", " at the end of the file")
    return f"{path}:{line}: this is no TOML: {reason[:1].lower()}{reason[1:]}"


def _parse_value(raw: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {raw}\n")
    except tomllib.TOMLDecodeError:
        return raw
    return parsed["value"] if len(parsed) == 1 else raw


def _frozen(value: Any) -> Any:
    """Lists as tuples, at any depth: what the strict schema wants."""
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return value
