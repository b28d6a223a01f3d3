"""From files to documents (strings), with every unreadable row counted and reported.

A row of a `.jsonl` or `.parquet` file is a document. Any other file is UTF-8 text: one document, or several
of at most 64 Ki characters, cut at line ends, so that one big file can still be shared and held out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from atoll.data.parquet import parquet_rows
from atoll.data.rows import BadRow, Row, jsonl_rows, text_rows
from atoll.errors import DataError
from atoll.events import RowsSkipped


def read_documents(
    files: Iterable[Path], *, field: str, max_bad_rows: int, report: Callable[[RowsSkipped], None]
) -> Iterator[str]:
    """The documents of `files`, in order; empty ones included.

    Bad rows are skipped, and reported once for each file that has some. More than `max_bad_rows` in all raise
    DataError, which names a file and line.
    """
    skipped = 0
    for path in files:
        here, example = 0, ""
        for row in _rows(path, field):
            if isinstance(row, str):
                yield row
                continue
            here += 1
            example = example or _where(path, row)
            if skipped + here > max_bad_rows:
                break
        if here:
            report(RowsSkipped(path=str(path), count=here, example=example))
        skipped += here
        if skipped > max_bad_rows:
            raise DataError(
                f"more than data.max_bad_rows = {max_bad_rows} rows could not be read, such as {example}; "
                "repair the files, leave them out of data.sources, or raise the limit"
            )


def _where(path: Path, row: BadRow) -> str:
    return f"{path}:{row.line}: {row.why}" if row.line else f"{path}: {row.why}"


def _rows(path: Path, field: str) -> Iterator[Row]:
    try:
        match path.suffix.lower():
            case ".jsonl":
                yield from jsonl_rows(path, field)
            case ".parquet":
                yield from parquet_rows(path, field)
            case _:
                yield from text_rows(path)
    except OSError as error:
        yield BadRow(0, f"cannot be read: {error.strerror or error}")
