"""Prepared text: a folder of token files, an index each, and a manifest. Described in docs/data-format.md.

Pure: bytes in, values out. Nothing is pickled, and a folder that is opened is checked against itself first.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Final

import msgspec

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
MAX_MANIFEST_BYTES: Final = 64 << 20
INDEX_ITEM_BYTES: Final = 16
"""Of a document: where it ends in its file, and the key of its content."""

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_HEX = re.compile(r"[0-9a-f]{64}")

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class TokenizerIdentity(msgspec.Struct, frozen=True):
    """Which tokenizer made the tokens: "bytes", or a file's name and the SHA-256 of its content."""

    name: str
    sha256: str
    vocab_size: _Count
    separator_id: _Count


class ShardEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file of tokens and its index. Documents lie whole in one file, each with its separator."""

    tokens: str
    index: str
    num_documents: _Count
    num_tokens: _Count
    tokens_sha256: str
    index_sha256: str


class ShardsManifest(msgspec.Struct, frozen=True, kw_only=True):
    """`digest` is the corpus's, as `data.corpus.Corpus.digest` gives it for the same text. `item_bytes` is 2 or 4."""

    format: int = FORMAT
    item_bytes: int
    num_documents: _Count
    num_tokens: _Count
    text_bytes: _Count
    empty_documents: _Count
    skipped_rows: _Count
    digest: str
    tokenizer: TokenizerIdentity
    shards: tuple[ShardEntry, ...]
    check: str = ""

    def sealed(self) -> ShardsManifest:
        """With `check`: SHA-256 over the compact JSON of all of it with `check` ""."""
        plain = msgspec.structs.replace(self, check="")
        return msgspec.structs.replace(plain, check=hashlib.sha256(msgspec.json.encode(plain)).hexdigest())


def encode(manifest: ShardsManifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest.sealed()), indent=1) + b"\n"


class _Head(msgspec.Struct):
    format: int


def decode(data: bytes) -> ShardsManifest:
    """Raises ValueError, with what is wrong, for anything that is no manifest or contradicts itself."""
    try:
        written = msgspec.json.decode(data, type=_Head).format
        if written != FORMAT:
            raise ValueError(f"it has format {written}, this version reads {FORMAT}")
        manifest = msgspec.json.decode(data, type=ShardsManifest)
    except msgspec.MsgspecError as error:
        raise ValueError(f"it is no manifest ({error})") from None
    complaint = _complaint(manifest)
    if complaint:
        raise ValueError(complaint)
    return manifest


def _complaint(manifest: ShardsManifest) -> str:
    """What does not fit, or ""."""
    if manifest.item_bytes not in (2, 4):
        return f"its tokens have {manifest.item_bytes} bytes, not 2 or 4"
    if not manifest.shards:
        return "it names no file"
    names = [name for shard in manifest.shards for name in (shard.tokens, shard.index)]
    for name in names:
        if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
            return f"{name[:100]!r} is no name for a file of it"
    if len(set(names)) != len(names):
        return "two of its files have one name"
    for shard in manifest.shards:
        if not (_HEX.fullmatch(shard.tokens_sha256) and _HEX.fullmatch(shard.index_sha256)):
            return f"{shard.tokens} has no SHA-256"
        if not 0 < shard.num_documents <= shard.num_tokens:
            return f"{shard.tokens} has {shard.num_documents} documents and {shard.num_tokens} tokens"
    if sum(shard.num_documents for shard in manifest.shards) != manifest.num_documents:
        return f"its files do not have {manifest.num_documents} documents"
    if sum(shard.num_tokens for shard in manifest.shards) != manifest.num_tokens:
        return f"its files do not have {manifest.num_tokens} tokens"
    if manifest.check != manifest.sealed().check:
        return "its check is not that of what it says"
    return ""
