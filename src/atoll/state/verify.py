"""Reading what a disk has of a snapshot, in one pass: every byte is read once, for its hash and for its digest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Final

import numpy as np

from atoll import kernels
from atoll.kernels import Floats, Table
from atoll.state import manifest as manifests
from atoll.state.manifest import VALUE_BYTES, VECTORS, Manifest, Shard, Vector
from atoll.state.snapshot import check_shard, damaged, opened, other_digest, read_manifest

_READ_BYTES: Final = 1 << 20
"""A buffer that the caches hold: hash and digest find there what was just read."""


def verify_snapshot(folder: Path, *, from_disk: bool = True, hashed: bool = False) -> Manifest:
    """Read what a disk has of a snapshot, and compare it with its digest tables, and with SHA-256 if `hashed`. Raises
    LocalError as `read_snapshot`.

    Takes little memory. What was just written is verified by the tables alone: they are the run's, they cover every
    value, and the header is compared with the manifest. A person who asks has both compared. `from_disk`: what the
    system has in memory of it does not count."""
    manifest = read_manifest(folder)
    num_pieces = len(manifest.anchor)
    tables: dict[Vector, Table] = {vector: np.zeros((num_pieces, 2), dtype=np.uint64) for vector in VECTORS}
    for shard in manifest.shards:
        path = folder / shard.file
        with opened(path) as file:
            if from_disk:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            check_shard(path, file, shard, hashed=False)
            file.seek(0)
            if hashed and shard.sha256:
                _pass_hashed(path, file, shard, tables)
            else:
                for vector in VECTORS:
                    file.seek(_first_byte(shard, vector))
                    for start, values in _values(path, file, shard):
                        _add(tables[vector], start, values)
    for vector in VECTORS:
        for piece, row in enumerate(manifests.table_rows(tables[vector])):
            if row != manifest.row(vector, piece):
                raise other_digest(folder, manifest, vector, piece * manifest.piece)
    return manifest


def _pass_hashed(path: Path, file: BufferedReader, shard: Shard, tables: Mapping[Vector, Table]) -> None:
    """From the first byte to the last."""
    sha = hashlib.sha256()
    for vector in sorted(VECTORS, key=lambda vector: _first_byte(shard, vector)):
        _hash_up_to(file, sha, _first_byte(shard, vector))  # a header
        for start, values in _values(path, file, shard):
            sha.update(values.data)
            _add(tables[vector], start, values)
    _hash_up_to(file, sha, shard.size_bytes)
    if sha.hexdigest() != shard.sha256:
        raise damaged(path, "its SHA-256 is not that of the manifest")


def _hash_up_to(file: BufferedReader, sha: hashlib._Hash, end: int) -> None:
    while (left := end - file.tell()) > 0 and (data := file.read(min(left, _READ_BYTES))):
        sha.update(data)


def _values(path: Path, file: BufferedReader, shard: Shard) -> Iterator[tuple[int, Floats]]:
    """One vector of a shard, from where the file stands, as `(first element, values)`; the values are overwritten by
    the next ones."""
    buffer = np.empty(_READ_BYTES // VALUE_BYTES, dtype="<f4")
    for start in range(shard.start, shard.stop, buffer.size):
        part = buffer[: min(buffer.size, shard.stop - start)]
        if file.readinto(part.data.cast("B")) != part.nbytes:
            raise damaged(path, "it ends too early")
        yield start, part


def _add(table: Table, start: int, values: Floats) -> None:
    """A piece's digest is a sum over its elements: parts of it are added."""
    native = values.astype(np.float32, copy=False)
    first = start // kernels.PIECE
    rows = kernels.digest_pieces(native, start)
    table[first : first + len(rows)] += rows


def _first_byte(shard: Shard, vector: Vector) -> int:
    return shard.anchor_at if vector == "anchor" else shard.velocity_at
