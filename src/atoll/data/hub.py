"""Rows of a data set of the Hugging Face hub, by the `datasets` package, which is imported when one is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from atoll.errors import ConfigError, DataError
from atoll.events import RowsSkipped


def hub_documents(
    name: str, *, field: str, max_bad_rows: int, report: Callable[[RowsSkipped], None]
) -> Iterator[str]:
    """The documents of `NAME` or `NAME:SPLIT` (default: train), as they stream in. Raises ConfigError without
    `datasets`, DataError for too many bad rows."""
    where, _, split = name.partition(":")
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise ConfigError(f'hf:{name} needs datasets: pip install "atoll-train[hub]"') from None
    try:
        rows = datasets.load_dataset(where, split=split or "train", streaming=True)
    except Exception as error:  # the package raises many kinds, for a wrong name as for no network
        first = str(error).partition("\n")[0]
        raise ConfigError(f"hf:{name} cannot be opened: {first or type(error).__name__}") from None
    bad, example = 0, ""
    for number, row in enumerate(rows, start=1):
        text = row.get(field)
        if isinstance(text, str):
            yield text
            continue
        bad += 1
        example = (
            example
            or f"hf:{name}:{number}: field {field!r} is {type(text).__name__}; it has {', '.join(row)}"
        )
        if bad > max_bad_rows:
            break
    if bad:
        report(RowsSkipped(path=f"hf:{name}", count=bad, example=example))
    if bad > max_bad_rows:
        raise DataError(
            f"more than {max_bad_rows} rows could not be read, such as {example}; set --field, or raise the limit"
        )
