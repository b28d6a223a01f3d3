"""From what `data.shards` says to a corpus."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atoll.data.mixing import Share, mix
from atoll.data.origins import HTTP, STORES
from atoll.data.remote_shards import CACHE_BYTES, RemoteFolder
from atoll.data.shard_format import TokenizerIdentity
from atoll.data.shards import LocalFolder, ShardCorpus, Shards
from atoll.errors import ConfigError


def shard_cache(setting: str) -> Path:
    """Where fetched shards are kept: what `data.cache` says, or the user's cache folder."""
    return Path(setting).expanduser() if setting else Path.home() / ".cache" / "atoll" / "shards"


def open_shards(name: str, cache: Path, cache_bytes: int = CACHE_BYTES) -> Shards:
    """A folder of prepared text: here, at an http address, or in an object store. Reads its manifest. Raises DataError
    or ConfigError."""
    if name.startswith((*HTTP, *STORES)):
        return Shards(RemoteFolder.at(name, cache, cache_bytes))
    return Shards(LocalFolder(Path(name).expanduser()))


def open_prepared(
    names: Sequence[str], weights: Sequence[float], seed: int, *, identity: TokenizerIdentity, cache: Path
) -> tuple[ShardCorpus, list[Share]]:
    """All of `data.shards` as one corpus. Raises ConfigError if they were prepared with another tokenizer than
    `identity`, the run's, DataError for damaged ones."""
    parts = [open_shards(name, cache) for name in names]
    for part in parts:
        theirs = part.manifest.tokenizer
        if (theirs.sha256, theirs.vocab_size) != (identity.sha256, identity.vocab_size):
            raise ConfigError(
                f"{part.name} was prepared with tokenizer {theirs.name} ({theirs.vocab_size} tokens), and "
                f"data.tokenizer is {identity.name} ({identity.vocab_size}); set it to that, or prepare the text again"
            )
    return mix(parts, weights, seed)
