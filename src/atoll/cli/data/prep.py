"""`atoll data prep`: text to token files, once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from atoll.cli.output import deliver
from atoll.errors import ConfigError
from atoll.events import RowsSkipped

_HUB = "hf:"


def prep(
    sources: Annotated[
        list[str],
        Parameter(
            help='Text files, folders, globs, .jsonl, .parquet; "python-stdlib"; or hf:NAME[:SPLIT].',
            show_default=False,
        ),
    ],
    /,
    *,
    out: Annotated[Path, Parameter(help="The folder to write.", show_default=False)],
    tokenizer: Annotated[str, Parameter(help='"bytes", or the path of a tokenizer.json.')] = "bytes",
    field: Annotated[str, Parameter(help="The text column of jsonl, parquet and hf rows.")] = "text",
    max_bad_rows: Annotated[
        int, Parameter(help="Unreadable rows that are skipped before it is an error.")
    ] = 100,
    shard_mb: Annotated[int, Parameter(help="Size of a token file, about, in MB.")] = 64,
    force: Annotated[bool, Parameter(help="Replace a folder that is there.", negative="")] = False,
) -> int:
    """Tokenize text once, into files that training maps into memory: `[data] shards = ["FOLDER"]`.

    The folder appears when all of it is there; Ctrl-C leaves nothing behind. The same text and tokenizer give the same
    bytes. Rows that cannot be read are skipped and counted, each file's first one is shown.

    Try:

        atoll data prep python-stdlib --out stdlib-bytes
        atoll data prep 'books/**/*.txt' rows.jsonl --tokenizer tokenizer.json --out books
        atoll data stats books

    Exit codes: 0 done; 2 usage; 3 no space; 8 no text, or too many bad rows; 130/143 stopped.
    """
    from atoll.data.preparing import identity_of, prepare  # numpy and a tokenizer: not for --help
    from atoll.data.tokenizer import load_tokenizer

    if shard_mb < 1:
        raise ConfigError(f"--shard-mb {shard_mb}: give at least 1")
    loaded = load_tokenizer(tokenizer, 1 << 32)
    item_bytes = 2 if loaded.vocab_size <= 1 << 16 else 4
    skipped: list[RowsSkipped] = []

    def report(event: RowsSkipped) -> None:
        skipped.append(event)
        print(f"atoll: skipped {event.count} rows of {event.path}: {event.example}", file=sys.stderr)

    total_bytes, texts = _texts(sources, field, max_bad_rows, report)
    began_s = time.monotonic()
    columns = (
        TextColumn("tokenizing"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total_bytes)
        manifest = prepare(
            texts,
            loaded,
            identity_of(tokenizer, loaded),
            out,
            force=force,
            shard_tokens=shard_mb * 1_000_000 // item_bytes,
            skipped_rows=lambda: sum(event.count for event in skipped),
            progress=lambda done: progress.advance(task, done),
        )
    seconds = time.monotonic() - began_s
    deliver(
        f"{out}: {manifest.num_documents:,} documents, {manifest.num_tokens:,} tokens in {len(manifest.shards)} files "
        f"({manifest.text_bytes / 1e6 / seconds:.1f} MB/s); {manifest.empty_documents} empty documents and "
        f"{manifest.skipped_rows} unreadable rows were left out\n"
        f'for the run: [data] shards = ["{out}"], tokenizer = "{tokenizer}"\n'
    )
    return 0


def _texts(
    sources: Sequence[str], field: str, max_bad_rows: int, report: Callable[[RowsSkipped], None]
) -> tuple[int | None, Iterator[str]]:
    """How many bytes of files there are (None: nobody knows), and the documents."""
    from atoll.data.documents import read_documents
    from atoll.data.hub import hub_documents
    from atoll.data.sources import expand_sources

    hub = [source.removeprefix(_HUB) for source in sources if source.startswith(_HUB)]
    files = expand_sources([source for source in sources if not source.startswith(_HUB)])
    # What is compressed, or framed as JSON, makes this a guess: the bar then ends early or late.
    total_bytes = None if hub else sum(path.stat().st_size for path in files if path.is_file())

    def texts() -> Iterator[str]:
        yield from read_documents(files, field=field, max_bad_rows=max_bad_rows, report=report)
        for name in hub:
            yield from hub_documents(name, field=field, max_bad_rows=max_bad_rows, report=report)

    return total_bytes, texts()
