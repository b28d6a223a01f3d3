"""Writing prepared text: documents in, a folder of token files out, published by a rename.

What is written depends on the documents and the tokenizer alone. Tokenizing uses all cores where the tokenizer does;
memory holds one batch, and 16 bytes a document.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from atoll.data import shard_format
from atoll.data.corpus import Indices, Keys, content_keys, little_endian
from atoll.data.shard_format import MANIFEST, ShardEntry, ShardsManifest, TokenizerIdentity
from atoll.data.tokenizer import BYTES, Tokenizer
from atoll.errors import ConfigError, DataError, LocalError

SHARD_TOKENS = 1 << 25
"""Tokens of a file, about: it ends with the document that fills it."""

_BATCH_CHARS = 1 << 20
_READ_BYTES = 4 << 20


def identity_of(name: str, tokenizer: Tokenizer) -> TokenizerIdentity:
    """Which tokenizer it is, by content. `name` as `data.tokenizer` says it. Raises OSError."""
    sha256 = "" if name == BYTES else hashlib.sha256(Path(name).expanduser().read_bytes()).hexdigest()
    shown = name if name == BYTES else Path(name).name
    return TokenizerIdentity(shown, sha256, tokenizer.vocab_size, tokenizer.separator_id)


def prepare(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    identity: TokenizerIdentity,
    out: Path,
    *,
    force: bool = False,
    shard_tokens: int = SHARD_TOKENS,
    skipped_rows: Callable[[], int] = lambda: 0,
    progress: Callable[[int], None] = lambda text_bytes: None,
) -> ShardsManifest:
    """Tokenize `texts` into the new folder `out`, whole or not at all. `progress` hears of the bytes of text done.

    Blocks. Raises ConfigError if `out` exists (without `force`), DataError if there is no text, LocalError for
    the disk.
    """
    if out.exists() and not force:
        raise ConfigError(f"{out} exists; choose another --out, or add --force to replace it")
    item_bytes = 2 if tokenizer.vocab_size <= 1 << 16 else 4
    try:
        with _draft(out) as folder:
            writer = _Writer(folder, item_bytes, shard_tokens)
            text_bytes = empty = 0
            for batch in _batches(texts):
                tokens, counts = tokenizer.encode_batch(batch)
                empty += counts.count(0)
                writer.add(tokens.astype(f"<u{item_bytes}"), counts, tokenizer.separator_id)
                done = sum(len(text.encode()) for text in batch)
                text_bytes += done
                progress(done)
            writer.end_shard()
            if not writer.shards:
                raise DataError(
                    f"there is no text: {empty} empty documents and {skipped_rows()} rows that could not be read"
                )
            manifest = ShardsManifest(
                item_bytes=item_bytes,
                num_documents=writer.num_documents,
                num_tokens=writer.num_tokens,
                text_bytes=text_bytes,
                empty_documents=empty,
                skipped_rows=skipped_rows(),
                digest=writer.digest(tokenizer.separator_id),
                tokenizer=identity,
                shards=tuple(writer.shards),
            ).sealed()
            with (folder / MANIFEST).open("xb") as file:
                _write(file, shard_format.encode(manifest))
            if out.exists():
                shutil.rmtree(out)
    except OSError as error:
        raise LocalError(
            f"cannot write {out}: {(error.strerror or str(error)).lower()}; free some space or choose another --out"
        ) from None
    return manifest


@contextmanager
def _draft(out: Path) -> Generator[Path]:
    """A folder that becomes `out` if nothing is raised, else is removed."""
    draft = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    draft.mkdir(parents=True)
    try:
        yield draft
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@dataclass
class _Writer:
    """One file after the other. Documents wait in memory until they fill one: it is written and hashed in one go."""

    folder: Path
    item_bytes: int
    shard_tokens: int
    shards: list[ShardEntry] = field(default_factory=list)
    num_documents: int = 0
    num_tokens: int = 0
    _parts: list[np.ndarray] = field(default_factory=list)
    _lengths: list[Indices] = field(default_factory=list)
    _waiting: int = 0

    def add(self, tokens: np.ndarray, counts: list[int], separator_id: int) -> None:
        lengths = np.array([count for count in counts if count], dtype=np.int64)
        if not len(lengths):
            return
        self._parts.append(np.insert(tokens, np.cumsum(lengths), separator_id))
        self._lengths.append(lengths + 1)
        self._waiting += int(lengths.sum()) + len(lengths)
        if self._waiting >= self.shard_tokens:
            self._end_full()

    def end_shard(self) -> None:
        """Write what waits."""
        if self._waiting:
            self._write_shard(np.concatenate(self._parts), np.concatenate(self._lengths))
            self._parts, self._lengths, self._waiting = [], [], 0

    def digest(self, separator_id: int) -> str:
        """`Corpus.digest` of all that was written, from the files."""
        lengths = np.concatenate([self._read_lengths(shard) for shard in self.shards])
        starts = np.concatenate([[1], 1 + np.cumsum(lengths)])
        sha = hashlib.sha256(b"atoll corpus 1 %d\n" % self.item_bytes)
        sha.update(little_endian(starts))
        sha.update(int(separator_id).to_bytes(self.item_bytes, "little"))
        for shard in self.shards:
            with (self.folder / shard.tokens).open("rb") as file:
                while data := file.read(_READ_BYTES):
                    sha.update(data)
        return sha.hexdigest()

    def _end_full(self) -> None:
        """Write as many files as are full; a file ends with the document that fills it, whatever the batches were."""
        tokens, lengths = np.concatenate(self._parts), np.concatenate(self._lengths)
        while len(tokens) >= self.shard_tokens:
            ends = np.cumsum(lengths)
            last = int(np.searchsorted(ends, self.shard_tokens)) + 1
            stop = int(ends[last - 1])
            self._write_shard(tokens[:stop], lengths[:last])
            tokens, lengths = tokens[stop:], lengths[last:]
        self._parts, self._lengths, self._waiting = [tokens], [lengths], len(tokens)

    def _write_shard(self, tokens: np.ndarray, lengths: Indices) -> None:
        number = len(self.shards)
        names = f"shard-{number:05d}.tokens", f"shard-{number:05d}.index"
        ends = np.cumsum(lengths)
        keys: Keys = content_keys(tokens, np.concatenate([[0], ends]))
        sums = []
        for name, data in zip(
            names, (little_endian(tokens), np.concatenate([ends.astype("<u8"), keys]).tobytes()), strict=True
        ):
            with (self.folder / name).open("xb") as file:
                _write(file, data)
            sums.append(hashlib.sha256(data).hexdigest())
        self.shards.append(
            ShardEntry(
                tokens=names[0],
                index=names[1],
                num_documents=len(lengths),
                num_tokens=len(tokens),
                tokens_sha256=sums[0],
                index_sha256=sums[1],
            )
        )
        self.num_documents += len(lengths)
        self.num_tokens += len(tokens)

    def _read_lengths(self, shard: ShardEntry) -> Indices:
        ends = np.fromfile(self.folder / shard.index, dtype="<u8", count=shard.num_documents)
        return np.diff(ends.astype(np.int64), prepend=0)


def _write(file: BinaryIO, data: bytes | memoryview) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch, chars = [], 0
    for text in texts:
        batch.append(text)
        chars += len(text)
        if chars >= _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch
