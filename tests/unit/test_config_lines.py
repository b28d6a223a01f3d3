"""The scanner finds the line of each key, whatever TOML's notation."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from atoll.config.toml_lines import KeyPath, key_lines

TEXT = '''\
top = 1  # a comment with [brackets] = and "quotes"
a.b.c = "x = 1\\n[not.a.table]"

[table]
text = """
key = 1
[fake]
"""
literal = \'\'\'
also = 2\'\'\'
"quoted key" = \'#\'
when = 1979-05-27T07:32:00Z
list = [
  1, # one
  [2, 3],
  { inline = true, deep.er = [4] },
]

[[rows]]
n = 1
[rows.sub]
m = 2
[[rows]]
n = 3
'''

EXPECTED: dict[KeyPath, int] = {
    ("top",): 1,
    ("a", "b", "c"): 2,
    ("table",): 4,
    ("table", "text"): 5,
    ("table", "literal"): 9,
    ("table", "quoted key"): 11,
    ("table", "when"): 12,
    ("table", "list"): 13,
    ("table", "list", 0): 14,
    ("table", "list", 1, 1): 15,
    ("table", "list", 2, "inline"): 16,
    ("table", "list", 2, "deep", "er", 0): 16,
    ("rows",): 19,
    ("rows", 0, "n"): 20,
    ("rows", 0, "sub"): 21,
    ("rows", 0, "sub", "m"): 22,
    ("rows", 1): 23,
    ("rows", 1, "n"): 24,
}


@pytest.mark.parametrize(("path", "line"), EXPECTED.items(), ids=lambda value: str(value))
def test_line_of(path: KeyPath, line: int) -> None:
    assert key_lines(TEXT)[path] == line


def test_every_value_has_a_line_and_no_other_has() -> None:
    assert set(key_lines(TEXT)) == set(_paths((), tomllib.loads(TEXT)))


def test_windows_line_ends() -> None:
    assert key_lines("[a]\r\nb = 1\r\nc = 2\r\n")[("a", "c")] == 3


def _paths(at: KeyPath, value: Any) -> list[KeyPath]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [at] if at else []
    for key, item in items:
        found += _paths((*at, key), item)
    return found
