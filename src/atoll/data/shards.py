"""Reading prepared text: token files are mapped, nothing as large as the corpus is copied.

Opening reads the manifest and the indexes: 16 bytes a document. What is read then is what batches ask for.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from atoll.data import shard_format
from atoll.data.corpus import Indices, Keys, held_out
from atoll.data.gathered import Gathered
from atoll.data.shard_format import INDEX_ITEM_BYTES, MANIFEST, MAX_MANIFEST_BYTES, ShardEntry, ShardsManifest
from atoll.data.tokenizer import Tokens
from atoll.errors import DataError


class Source(Protocol):
    """Where a folder of shards is: on a disk, or fetched to one."""

    @property
    def name(self) -> str: ...

    def manifest(self) -> bytes: ...

    def path(self, file: str, size_bytes: int, sha256: str) -> Path:
        """Where the file is on this machine; it has that size. May block to fetch it. Raises AtollError."""
        ...


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """Shards in a folder. Sizes are checked as files are opened, contents by `verify`."""

    folder: Path

    @property
    def name(self) -> str:
        return str(self.folder)

    def manifest(self) -> bytes:
        path = self.folder / MANIFEST
        try:
            with path.open("rb") as file:
                return file.read(MAX_MANIFEST_BYTES)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise DataError(
                f"{path} cannot be read: {reason}; data.shards names folders that `atoll data prep` has made"
            ) from None

    def path(self, file: str, size_bytes: int, sha256: str) -> Path:
        path = self.folder / file
        try:
            found = path.stat().st_size
        except OSError as error:
            raise _damaged(path, f"it cannot be read: {(error.strerror or str(error)).lower()}") from None
        if path.is_symlink():
            raise _damaged(path, "it is a link")
        if found != size_bytes:
            raise _damaged(path, f"it has {found} bytes and should have {size_bytes}")
        return path


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardCorpus:
    """A corpus that stays where it is (`data.corpus.Documents`). `keys` are those of the documents' contents."""

    tokens: Gathered
    starts: Indices
    keys: Keys
    known_digest: str
    empty_documents: int = 0

    @classmethod
    def of(
        cls, tokens: Gathered, lengths: Indices, keys: Keys, digest: str, empty_documents: int = 0
    ) -> ShardCorpus:
        starts = np.concatenate([[1], 1 + np.cumsum(lengths)])
        return cls(
            tokens=tokens, starts=starts, keys=keys, known_digest=digest, empty_documents=empty_documents
        )

    @property
    def num_documents(self) -> int:
        return len(self.starts) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens that can be predicted: all but the very first separator."""
        return len(self.tokens) - 1

    def digest(self) -> str:
        """That of the whole corpus, as it was prepared."""
        return self.known_digest

    def select(self, documents: Indices) -> ShardCorpus:
        """The named documents in the given order. Copies no token."""
        lengths = np.diff(self.starts)[documents]
        chosen = self.tokens.reordered(self.starts[:-1][documents], lengths)
        return ShardCorpus.of(chosen, lengths, self.keys[documents], self.known_digest)

    def in_pieces(self, max_tokens: int) -> ShardCorpus:
        """The same tokens, with documents of more than `max_tokens` cut into pieces that count as documents."""
        counts = -(-np.diff(self.starts) // max_tokens)
        first = np.cumsum(counts) - counts
        nth = np.arange(counts.sum()) - np.repeat(first, counts)
        starts = np.concatenate([np.repeat(self.starts[:-1], counts) + nth * max_tokens, self.starts[-1:]])
        return replace(self, starts=starts, keys=np.repeat(self.keys, counts))

    def split(self, val_fraction: float) -> tuple[ShardCorpus, ShardCorpus]:
        """A train and a held-out part (`data.corpus.held_out`). Raises DataError for one document."""
        apart = held_out(self.keys, val_fraction)
        return self.select(np.flatnonzero(~apart)), self.select(np.flatnonzero(apart))


class Shards:
    """One folder of prepared text, opened. A `Store`: its files one after the other."""

    def __init__(self, source: Source) -> None:
        """Reads the manifest. Raises DataError, naming the file and what to do."""
        self._source = source
        try:
            self.manifest: ShardsManifest = shard_format.decode(source.manifest())
        except ValueError as error:
            raise _damaged(f"{source.name}/{MANIFEST}", str(error)) from None
        self._dtype: np.dtype[Any] = np.dtype(f"<u{self.manifest.item_bytes}")
        ends = np.cumsum([shard.num_tokens for shard in self.manifest.shards])
        self._firsts: list[int] = [0, *ends.tolist()]
        self._maps: dict[int, Tokens] = {}

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    def read(self, offset: int, out: Tokens) -> None:
        """Within one file: documents do not go on in the next."""
        which = int(np.searchsorted(self._firsts, offset, side="right")) - 1
        first = offset - self._firsts[which]
        out[:] = self._mapped(which)[first : first + len(out)]

    def index(self) -> tuple[Indices, Keys]:
        """Lengths of all documents, separators included, and the keys of their contents."""
        lengths, keys = [], []
        for shard in self.manifest.shards:
            size_bytes = shard.num_documents * INDEX_ITEM_BYTES
            path = self._source.path(shard.index, size_bytes, shard.index_sha256)
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != shard.index_sha256:
                raise _damaged(path, "its SHA-256 is not that of the manifest")
            both = np.frombuffer(data, dtype="<u8").reshape(2, shard.num_documents)
            ends = both[0].astype(np.int64)
            here = np.diff(ends, prepend=0)
            if ends[-1] != shard.num_tokens or here.min() < 2:  # a token and a separator
                raise _damaged(path, "its documents do not cover their file")
            lengths.append(here)
            keys.append(both[1].astype(np.uint64))
        return np.concatenate(lengths), np.concatenate(keys)

    def corpus(self) -> ShardCorpus:
        """All documents, in the order in which they lie."""
        lengths, keys = self.index()
        at = np.cumsum(lengths) - lengths
        gathered = Gathered(self, self.manifest.tokenizer.separator_id, at, lengths)
        return ShardCorpus.of(gathered, lengths, keys, self.manifest.digest, self.manifest.empty_documents)

    def verify(self) -> None:
        """Read every byte and compare it with the sums of the manifest. Blocks. Raises DataError."""
        self.index()
        for which, shard in enumerate(self.manifest.shards):
            if hashlib.sha256(self._mapped(which).view(np.uint8).data).hexdigest() != shard.tokens_sha256:
                raise _damaged(f"{self.name}/{shard.tokens}", "its SHA-256 is not that of the manifest")

    def _mapped(self, which: int) -> Tokens:
        found = self._maps.get(which)
        if found is None:
            shard: ShardEntry = self.manifest.shards[which]
            size_bytes = shard.num_tokens * self._dtype.itemsize
            path = self._source.path(shard.tokens, size_bytes, shard.tokens_sha256)
            found = self._maps[which] = np.memmap(path, dtype=self._dtype, mode="r")
        return found


def _damaged(path: Path | str, what: str) -> DataError:
    return DataError(
        f"prepared data {path} is damaged or unfinished: {what}; prepare it again, or copy it again"
    )
