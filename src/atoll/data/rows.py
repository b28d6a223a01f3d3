"""Rows of text and jsonl files: each a document, or the reason why it is none."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

PIECE_CHARS = 1 << 16
"""The longest document that a plain text file yields, in characters."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be read. `line` counts from 1; 0 means the file as a whole."""

    line: int
    why: str


Row = str | BadRow


def text_rows(path: Path) -> Iterator[Row]:
    """The file as one document, or as several where it is longer than PIECE_CHARS."""
    raw = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        yield BadRow(line, f"is no UTF-8 text (byte {error.start} is 0x{raw[error.start]:02x})")
    else:
        yield from _pieces(text)


def _pieces(text: str) -> Iterator[str]:
    """The whole text, cut after line ends where it is longer than PIECE_CHARS."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        stop = text.rfind("\n", start, start + PIECE_CHARS) + 1 or start + PIECE_CHARS
        yield text[start:stop]
        start = stop
    yield text[start:]


def jsonl_rows(path: Path, field: str) -> Iterator[Row]:
    """The string `field` of each line; blank lines are no rows."""
    decode = msgspec.json.Decoder().decode
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            raw = raw.removeprefix(codecs.BOM_UTF8) if line == 1 else raw
            if raw.isspace():
                continue
            try:
                row = decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                yield BadRow(line, f"is no JSON: {error}")
            else:
                yield _field_of(row, field, line)


def _field_of(row: object, field: str, line: int) -> Row:
    if not isinstance(row, dict):
        return BadRow(line, "is no JSON object")
    if field not in row:
        return BadRow(line, f"has no field {field!r}; it has {', '.join(map(repr, row)) or 'none'}")
    text = row[field]
    if not isinstance(text, str):
        return BadRow(line, f"field {field!r} is no string but {type(text).__name__}")
    return text
