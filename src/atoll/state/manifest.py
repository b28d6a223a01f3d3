"""What a snapshot's `manifest.json` says: which version, in which files, and what each piece of it must be.

Pure: bytes in, values out. The digest tables are the heart of it: SHA-256 over them is the run's digest of that
version, and they name every piece of 2^20 elements. So whoever knows the digest can check any part of a snapshot,
whoever it came from. The format is described in docs/checkpoint-format.md.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final, Literal

import msgspec
import numpy as np

from atoll import kernels
from atoll.kernels import Floats, Table

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
VALUE_BYTES: Final = 4

Vector = Literal["anchor", "velocity"]
VECTORS: Final[tuple[Vector, ...]] = ("anchor", "velocity")

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ROW = re.compile(r"[0-9a-f]{32}")


class Shard(msgspec.Struct, frozen=True):
    """One safetensors file: elements `[start, stop)` of both vectors, and the byte of the file where each begins.

    `sha256` is that of the file; "" where it was left out (in RAM, where the digest tables do).
    """

    file: str
    start: int
    stop: int
    size_bytes: int
    anchor_at: int
    velocity_at: int
    sha256: str = ""


class Span(msgspec.Struct, frozen=True):
    """Bytes of one file of a snapshot."""

    file: str
    offset: int
    size_bytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot: the state after `version`, `round` rounds and `step` inner steps of the run.

    `anchor` and `velocity` are the digest tables, a row of 32 hex digits per piece; `digest` is the state's. `check` is
    over all that no digest covers (`check_of`). `term` is the one under which a saved version was committed; 0 where
    nobody said.
    """

    format: int = FORMAT
    run: str
    version: int
    round: int
    step: int
    numel: int
    piece: int = kernels.PIECE
    digest: str
    anchor: tuple[str, ...]
    velocity: tuple[str, ...]
    shards: tuple[Shard, ...]
    check: str = ""
    term: int = 0

    def row(self, vector: Vector, piece: int) -> str:
        return self.anchor[piece] if vector == "anchor" else self.velocity[piece]

    def spans(self, vector: Vector, start: int, stop: int) -> tuple[Span, ...]:
        """Where elements `[start, stop)` of a vector lie, in order."""
        found = []
        for shard in self.shards:
            first, last = max(start, shard.start), min(stop, shard.stop)
            if first < last:
                at = shard.anchor_at if vector == "anchor" else shard.velocity_at
                offset = at + (first - shard.start) * VALUE_BYTES
                found.append(Span(shard.file, offset, (last - first) * VALUE_BYTES))
        return tuple(found)


def rows_of(values: Floats, start: int = 0) -> list[str]:
    """The digest table of values that begin at element `start`, as a manifest writes it."""
    return table_rows(kernels.digest_pieces(values, start))


def table_rows(table: Table) -> list[str]:
    """One text per row: the two sums, little-endian, in hex."""
    text = np.ascontiguousarray(table, dtype="<u8").tobytes().hex()
    return [text[at : at + 32] for at in range(0, len(text), 32)]


def digest_of(anchor: tuple[str, ...], velocity: tuple[str, ...]) -> str:
    """The state's digest, from its tables; the same as `kernels.state_digest`."""
    return hashlib.sha256(bytes.fromhex("".join(anchor) + "".join(velocity))).hexdigest()


def check_of(manifest: Manifest) -> str:
    """SHA-256 over the compact JSON of a list: what the manifest says, apart from the tables and this."""
    shards = [msgspec.structs.astuple(shard) for shard in manifest.shards]
    numbers = (manifest.version, manifest.round, manifest.step, manifest.numel, manifest.piece)
    said = [manifest.format, manifest.run, *numbers, manifest.digest, shards]
    return hashlib.sha256(msgspec.json.encode(said)).hexdigest()


def sealed(manifest: Manifest) -> Manifest:
    """With the check that fits."""
    return msgspec.structs.replace(manifest, check=check_of(manifest))


def encode(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def decode(data: bytes) -> Manifest:
    """Raises ValueError, with what is wrong, for anything that is no manifest or contradicts itself."""
    try:
        written = msgspec.json.decode(data, type=_Head).format
        if written != FORMAT:
            raise ValueError(f"it has format {written}, this version reads {FORMAT}")
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise ValueError(f"it is no manifest ({error})") from None
    complaint = _complaint(manifest)
    if complaint:
        raise ValueError(complaint)
    return manifest


class _Head(msgspec.Struct):
    format: int


def _complaint(manifest: Manifest) -> str:
    """What does not fit, or ""."""
    if min(manifest.version, manifest.round, manifest.step) < 0 or manifest.numel < 1:
        return "it counts below zero"
    if manifest.piece != kernels.PIECE:
        return f"its pieces have {manifest.piece} elements, this version's {kernels.PIECE}"
    num_pieces = -(-manifest.numel // manifest.piece)
    for vector, rows in zip(VECTORS, (manifest.anchor, manifest.velocity), strict=True):
        if len(rows) != num_pieces or not all(_ROW.fullmatch(row) for row in rows):
            return f"the digest table of the {vector} does not have {num_pieces} rows"
    if digest_of(manifest.anchor, manifest.velocity) != manifest.digest:
        return "its digest is not that of its tables"
    complaint = _shards_complaint(manifest)
    if not complaint and check_of(manifest) != manifest.check:
        return "its check is not that of what it says"
    return complaint


def _shards_complaint(manifest: Manifest) -> str:
    reached = 0
    for shard in manifest.shards:
        if not _FILE_NAME.fullmatch(shard.file) or shard.file == MANIFEST:
            return f"{shard.file[:100]!r} is no name for a shard"
        if shard.start != reached or shard.stop <= shard.start:
            return f"its shards do not follow each other at element {reached}"
        reached = shard.stop
        room = shard.size_bytes - (shard.stop - shard.start) * VALUE_BYTES
        if not (0 < shard.anchor_at <= room and 0 < shard.velocity_at <= room):
            return f"{shard.file} has {shard.size_bytes} bytes, too few for its elements"
    if reached != manifest.numel:
        return f"its shards end at element {reached} of {manifest.numel}"
    if len({shard.file for shard in manifest.shards}) != len(manifest.shards):
        return "two of its shards have one name"
    return ""
