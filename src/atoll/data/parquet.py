"""Rows of a parquet file, by pyarrow (extra `[data]`), which is imported when the first such file is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.data.rows import BadRow, Row
from atoll.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow

_ROWS_AT_ONCE = 1024


def parquet_rows(path: Path, field: str) -> Iterator[Row]:
    """The column `field`, row by row; `line` of a bad row is its number in the file, from 1.

    A damaged file yields what is readable before the damage, then one bad row for the rest.
    Raises ConfigError without pyarrow, and where the file has no text column of that name.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(f'{path} needs pyarrow to be read: pip install "atoll-train[data]"') from None
    done = 0
    try:
        with ParquetFile(path) as file:
            _check_column(path, field, file.schema_arrow)
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[field]):
                yield from _column_rows(batch.column(0), field, done + 1)
                done += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        yield BadRow(done + 1, f"the rest of the file is damaged: {_first_line(error)}")


def _check_column(path: Path, field: str, schema: pyarrow.Schema) -> None:
    import pyarrow.types as types

    if field not in schema.names:
        raise ConfigError(
            f"{path} has no column {field!r}; set data.field to one of {', '.join(map(repr, schema.names))}"
        )
    kind = schema.field(field).type
    value_kind = kind.value_type if types.is_dictionary(kind) else kind
    if not any(
        is_text(value_kind) for is_text in (types.is_string, types.is_large_string, types.is_string_view)
    ):
        raise ConfigError(f"{path}: column {field!r} holds {kind}, not text; set data.field to a text column")


def _column_rows(column: Any, field: str, first: int) -> Iterator[Row]:
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:  # one cell is no UTF-8: look at each
        values = column
    for row, value in enumerate(values, start=first):
        yield value if isinstance(value, str) else _cell(value, field, row)


def _cell(scalar: Any, field: str, row: int) -> Row:
    try:
        text = None if scalar is None else scalar.as_py()
    except UnicodeDecodeError as error:
        return BadRow(row, f"field {field!r} is no UTF-8 text (at byte {error.start})")
    return BadRow(row, f"field {field!r} is null") if text is None else text


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
