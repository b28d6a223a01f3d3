"""The line of each key of a TOML text: `tomllib` gives values without positions, messages need both.

The scanner only sees text that `tomllib` has accepted, so it looks for keys and leaves correctness alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

KeyPath = tuple[str | int, ...]

_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"""+'  # multi-line basic string
    r"|'''.*?'''+"  # multi-line literal string
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|\n|[\[\]{}=,.]"
    r"|[^\s\[\]{}=,.\#\"']+",
    re.DOTALL,
)
_END = {",", "]", "}", "\n", ""}


def key_lines(text: str) -> dict[KeyPath, int]:
    """Line numbers, from 1, of every key, table and array element of a valid TOML text."""
    scanner = _Scanner(text)
    scanner.document()
    return scanner.lines


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    line = 1
    for match in _TOKEN.finditer(text):
        token = match.group()
        if not token.startswith("#"):
            yield token, line
        line += token.count("\n")


class _Scanner:
    """A recursive descent over the tokens that notes where keys begin."""

    def __init__(self, text: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._tokens = list(_tokens(text))
        self._at = 0
        self._array_index: dict[KeyPath, int] = {}

    def document(self) -> None:
        table: KeyPath = ()
        while self._at < len(self._tokens):
            if self._token == "\n":
                self._at += 1
            elif self._token == "[":
                table = self._header()
            else:
                self._pair(table)

    @property
    def _token(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    @property
    def _line(self) -> int:
        return self._tokens[min(self._at, len(self._tokens) - 1)][1]

    def _header(self) -> KeyPath:
        line = self._line
        self._at += 1
        is_array = self._token == "["
        self._at += is_array
        names = self._key()
        path: KeyPath = ()
        for name in names[:-1]:
            path = self._newest((*path, name))
        path = (*path, names[-1])
        self.lines.setdefault(path, line)
        if is_array:
            self._array_index[path] = self._array_index.get(path, -1) + 1
        path = self._newest(path)
        self.lines.setdefault(path, line)
        self._at += 2 if is_array else 1
        return path

    def _newest(self, path: KeyPath) -> KeyPath:
        """The path itself or, for an array of tables, its newest element."""
        return (*path, self._array_index[path]) if path in self._array_index else path

    def _key(self) -> list[str]:
        """Dotted key: names up to `=` or `]`; leaves the cursor on what follows."""
        names = []
        while self._token not in {"=", "]", ""}:
            if self._token not in {".", "\n"}:
                names.append(self._token.strip("\"'"))
            self._at += 1
        return names

    def _pair(self, table: KeyPath) -> None:
        line = self._line
        path = table
        for name in self._key():
            path = (*path, name)
            self.lines.setdefault(path, line)
        self._at += 1
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        opening = self._token
        if opening not in {"[", "{"}:
            while self._token not in _END:
                self._at += 1
            return
        closing = "]" if opening == "[" else "}"
        self._at += 1
        index = 0
        while self._token not in {closing, ""}:
            if self._token in {",", "\n"}:
                self._at += 1
            elif opening == "{":
                self._pair(path)
            else:
                self.lines[(*path, index)] = self._line
                self._value((*path, index))
                index += 1
        self._at += 1
