"""`atoll data stats`: what prepared text holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from atoll.cli.output import deliver


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """One folder. Lengths are of documents, in tokens, separators included, at the given shares of all documents."""

    name: str
    documents: int
    tokens: int
    bytes_per_token: float
    empty_documents: int
    skipped_rows: int
    tokenizer: str
    vocab_size: int
    digest: str
    lengths: dict[str, int]
    share: float
    passes: float


def stats(
    shards: Annotated[
        list[str],
        Parameter(
            help="Folders, or http or object store addresses, that `atoll data prep` has made.",
            show_default=False,
        ),
    ],
    /,
    *,
    weights: Annotated[
        list[float] | None, Parameter(help="The share of each, as data.weights.", show_default=False)
    ] = None,
    seed: Annotated[int, Parameter(help="The run's seed: it chooses what a mix repeats.")] = 0,
    verify: Annotated[
        bool, Parameter(help="Read every byte, and compare it with its sums.", negative="")
    ] = False,
    cache: Annotated[str, Parameter(help="As data.cache.", show_default=False)] = "",
    json: Annotated[
        bool, Parameter(help="Print one JSON object on stdout, and nothing else.", negative="")
    ] = False,
) -> int:
    """Show what prepared text holds: documents, tokens, how long documents are, and what a mix makes of it.

    `share` is the part of an epoch's tokens, `passes` how often a corpus is read in it.

    Try:

        atoll data stats books
        atoll data stats books code --weights 0.7 --weights 0.3 --json

    Exit codes: 0 done; 2 usage; 8 damaged, with a sentence.
    """
    from atoll.data.mixing import mix  # numpy is not for --help
    from atoll.data.opening import open_shards, shard_cache
    from atoll.data.quantiles import length_quantiles

    parts = [open_shards(name, shard_cache(cache)) for name in shards]
    if verify:
        for part in parts:
            part.verify()
    corpus, shares = mix(parts, weights or (), seed)
    rows = [
        Stats(
            name=part.name,
            documents=part.manifest.num_documents,
            tokens=part.manifest.num_tokens,
            bytes_per_token=part.manifest.text_bytes / part.manifest.num_tokens,
            empty_documents=part.manifest.empty_documents,
            skipped_rows=part.manifest.skipped_rows,
            tokenizer=part.manifest.tokenizer.name,
            vocab_size=part.manifest.tokenizer.vocab_size,
            digest=part.manifest.digest,
            lengths=length_quantiles(part.index()[0]),
            share=share.tokens / corpus.num_tokens,
            passes=share.passes,
        )
        for part, share in zip(parts, shares, strict=True)
    ]
    if json:
        said = {"shards": rows, "epoch_tokens": corpus.num_tokens, "epoch_documents": corpus.num_documents}
        deliver(msgspec.json.encode(said).decode() + "\n")
        return 0
    Console(highlight=False).print(_table(rows))
    for row in rows:
        if row.empty_documents or row.skipped_rows:
            deliver(
                f"{row.name}: {row.empty_documents} empty documents and {row.skipped_rows} unreadable rows left out\n"
            )
    deliver(f"an epoch: {corpus.num_documents:,} documents, {corpus.num_tokens:,} tokens\n")
    return 0


def _table(rows: list[Stats]) -> Table:
    """Narrow enough for a terminal of 80 columns; --json has the rest."""
    table = Table(box=None, pad_edge=False)
    table.add_column("shards", overflow="fold")
    for name in ("documents", "tokens", "B/token", "median", "longest", "share", "passes"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            Path(row.name).name or row.name,
            f"{row.documents:,}",
            f"{row.tokens:,}",
            f"{row.bytes_per_token:.2f}",
            f"{row.lengths['0.5']:,}",
            f"{row.lengths['1']:,}",
            f"{row.share:.1%}",
            f"{row.passes:.2f}",
        )
    return table
