"""The corpus: all documents as one array of tokens, split by document into a train and a held-out part."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from atoll.data.documents import read_documents
from atoll.data.sources import expand_sources
from atoll.data.tokenizer import Tokenizer, Tokens
from atoll.errors import DataError
from atoll.events import RowsSkipped

_TEXTS_AT_ONCE = 256

Indices = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]


class TokenArray(Protocol):
    """Tokens that are read by one slice, or by an array of offsets whose rows are stretches."""

    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, where: Any, /) -> Tokens: ...


class Documents(Protocol):
    """What training asks of a corpus, in memory (`Corpus`) or not (`data.shards.ShardCorpus`)."""

    @property
    def tokens(self) -> TokenArray: ...
    @property
    def starts(self) -> Indices: ...
    @property
    def empty_documents(self) -> int: ...
    @property
    def num_documents(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    def digest(self) -> str: ...
    def select(self, documents: Indices, /) -> Documents: ...
    def in_pieces(self, max_tokens: int, /) -> Documents: ...
    def split(self, val_fraction: float, /) -> tuple[Documents, Documents]: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """Documents in a fixed order, each followed by a separator; one more separator stands before the first.

    Document `i` is `tokens[starts[i] : starts[i + 1]]`, its separator included. Whatever document one begins
    at, the token before it is a separator: so every token of every document, and its end, can be predicted.
    """

    tokens: Tokens
    starts: Indices
    empty_documents: int = 0

    @property
    def num_documents(self) -> int:
        return len(self.starts) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens that can be predicted: all but the very first separator."""
        return len(self.tokens) - 1

    def digest(self) -> str:
        """SHA-256 over tokens and document starts, in hex: equal on peers that hold the same corpus."""
        sha = hashlib.sha256(b"atoll corpus 1 %d\n" % self.tokens.itemsize)
        sha.update(little_endian(self.starts))
        sha.update(little_endian(self.tokens))
        return sha.hexdigest()

    def select(self, documents: Indices) -> Corpus:
        """A copy that holds the named documents, in the given order."""
        starts, lengths = self.starts.tolist(), np.diff(self.starts)[documents]
        parts = [self.tokens[starts[i] : starts[i + 1]] for i in documents.tolist()]
        return Corpus(
            tokens=np.concatenate([self.tokens[:1], *parts]),
            starts=np.concatenate([[1], 1 + np.cumsum(lengths)]),
        )

    def in_pieces(self, max_tokens: int) -> Corpus:
        """The same tokens, with documents of more than `max_tokens` cut into pieces that count as documents."""
        cuts = [np.arange(a, b, max_tokens, dtype=np.int64) for a, b in pairwise(self.starts.tolist())]
        return Corpus(tokens=self.tokens, starts=np.concatenate([*cuts, self.starts[-1:]]))

    def split(self, val_fraction: float) -> tuple[Corpus, Corpus]:
        """A train and a held-out part (`held_out`). Raises DataError for one document."""
        apart = held_out(content_keys(self.tokens, self.starts), val_fraction)
        return self.select(np.flatnonzero(~apart)), self.select(np.flatnonzero(apart))


def content_keys(tokens: Tokens, starts: Indices) -> Keys:
    """A number for each document, from its content alone."""
    raw = memoryview(little_endian(tokens))
    cuts = (starts * tokens.itemsize).tolist()
    keys = (hashlib.blake2b(raw[a:b], digest_size=8).digest() for a, b in pairwise(cuts))
    return np.frombuffer(b"".join(keys), dtype="<u8")


def held_out(keys: Keys, val_fraction: float) -> npt.NDArray[np.bool_]:
    """Which documents, by the keys of their contents, are held out: at least one, never all.

    So it does not depend on the order of files, equal documents fall on the same side, and a corpus that grows keeps
    most of its held-out part. Raises DataError for one document.
    """
    if len(keys) < 2:
        raise DataError(
            "the corpus is a single document, but one must be held out for validation; "
            "give more files or rows, or a longer text"
        )
    return _smallest(keys, val_fraction)


def read_corpus(
    sources: Sequence[str],
    tokenizer: Tokenizer,
    *,
    field: str = "text",
    max_bad_rows: int = 100,
    report: Callable[[RowsSkipped], None],
) -> Corpus:
    """Read and tokenize all of `sources` into memory. Blocks: a second or two for 100 MB of bytes.

    Raises ConfigError for sources that do not exist, DataError for too many bad rows and for a corpus without
    text.
    """
    skipped: list[RowsSkipped] = []

    def tally(event: RowsSkipped) -> None:
        skipped.append(event)
        report(event)

    files = expand_sources(sources)
    texts = read_documents(files, field=field, max_bad_rows=max_bad_rows, report=tally)
    corpus = tokenize(texts, tokenizer)
    if not corpus.num_documents:
        bad_rows = sum(event.count for event in skipped)
        example = f", the first {skipped[0].example}" if skipped else ""
        raise DataError(
            f"the corpus is empty: data.sources = {list(sources)} gave {len(files)} files, "
            f"{corpus.empty_documents} empty documents and {bad_rows} unreadable rows{example}"
        )
    return corpus


def tokenize(texts: Iterable[str], tokenizer: Tokenizer) -> Corpus:
    """The corpus of `texts`, in order. Documents without a token are dropped and counted."""
    parts: list[Tokens] = []
    lengths: list[int] = []
    for batch in _batches(texts):
        tokens, counts = tokenizer.encode_batch(batch)
        parts.append(tokens)
        lengths += counts
    if not any(lengths):
        nothing = np.array([tokenizer.separator_id], dtype=np.uint32)
        return Corpus(tokens=nothing, starts=np.ones(1, dtype=np.int64), empty_documents=len(lengths))
    filled = np.array(lengths, dtype=np.int64)
    filled = filled[filled > 0]
    ends = np.concatenate([[0], np.cumsum(filled)])
    return Corpus(
        tokens=np.insert(np.concatenate(parts), ends, tokenizer.separator_id),
        starts=ends + np.arange(1, len(ends) + 1),
        empty_documents=len(lengths) - len(filled),
    )


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    texts = iter(texts)
    while batch := list(islice(texts, _TEXTS_AT_ONCE)):
        yield batch


def little_endian(array: npt.NDArray[np.integer]) -> memoryview:
    """The array's memory, least significant byte first."""
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return little.view(np.uint8).data


def _smallest(keys: Keys, fraction: float) -> npt.NDArray[np.bool_]:
    """A mask of about `fraction` of the keys: at least one, never all, equal keys alike."""
    wanted = min(max(round(len(keys) * fraction), 1), len(keys) - 1)
    order = np.argsort(keys, kind="stable")
    mask = keys <= keys[order[wanted - 1]]
    if mask.all():
        mask[order[wanted:]] = False
    return mask
