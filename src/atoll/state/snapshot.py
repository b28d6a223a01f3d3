"""Snapshots as files: a folder with safetensors shards in global coordinates and a manifest, all of it or none.

A snapshot is written aside, the manifest last, and published by renaming its folder; readers check everything that
they use. Format: docs/checkpoint-format.md. Nothing here pickles.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import shutil
import stat
import struct
import sys
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from atoll import kernels
from atoll.errors import LocalError
from atoll.kernels import Floats
from atoll.state import manifest as manifests
from atoll.state.manifest import MANIFEST, VALUE_BYTES, VECTORS, Manifest, Shard, Vector

SHARD_ELEMENTS: Final = 64 * kernels.PIECE
"""Shards on disk have at most so many elements of each vector: half a gigabyte."""

Rows = tuple[tuple[str, ...], tuple[str, ...]]
"""The digest tables of anchor and velocity, as a manifest writes them."""

_PAGE = 4096
_CHUNK_BYTES = 4 << 20
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 1 << 20
_MAX_MANIFEST_BYTES = 64 << 20  # 64 bytes a piece: enough for 10^12 parameters


class SharedState(Protocol):
    """The part of the state that all members share: what a snapshot holds (`diloco.outer.OuterState`). One of several
    ranks has `anchor` and `velocity` of its own ranges only; `numel` counts the elements of all."""

    anchor: Floats
    velocity: Floats
    version: int
    round: int
    step: int

    @property
    def numel(self) -> int: ...


@dataclass(slots=True)
class LoadedState:
    """A shared state that was read."""

    anchor: Floats
    velocity: Floats
    version: int
    round: int
    step: int

    @property
    def numel(self) -> int:
        return self.anchor.size


def shard_header(start: int, stop: int) -> bytes:
    """What a shard begins with: a safetensors header, padded to whole pages so that values can be mapped."""
    size = (stop - start) * VALUE_BYTES
    entries = {
        "__metadata__": {"format": "atoll snapshot 1", "start": str(start), "stop": str(stop)},
        "anchor": {"dtype": "F32", "shape": [stop - start], "data_offsets": [0, size]},
        "velocity": {"dtype": "F32", "shape": [stop - start], "data_offsets": [size, 2 * size]},
    }
    text = msgspec.json.encode(entries)
    text += b" " * (-(_LENGTH.size + len(text)) % _PAGE)
    return _LENGTH.pack(len(text)) + text


def shard_of(file: str, start: int, stop: int, sha256: str = "") -> Shard:
    """The manifest's entry of a file that begins with `shard_header` and goes on with both vectors."""
    first = len(shard_header(start, stop))
    size = (stop - start) * VALUE_BYTES
    return Shard(
        file, start, stop, first + 2 * size, anchor_at=first, velocity_at=first + size, sha256=sha256
    )


def write_snapshot(
    folder: Path, state: SharedState, run: str, shard_elements: int = SHARD_ELEMENTS
) -> Manifest:
    """Write `state` to the new folder `folder`; when this returns the disk has it. Raises LocalError."""
    draft = folder.with_name(f".draft-{folder.name}")
    try:
        if folder.exists():
            raise LocalError(f"snapshot {folder} exists already; remove it or choose another name")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        rows = tuple(manifests.rows_of(state.anchor)), tuple(manifests.rows_of(state.velocity))
        manifest = fill_snapshot(draft, state, run, rows, shard_elements)
        draft.rename(folder)  # the commit point
        sync_folder(folder.parent)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise LocalError(
            f"cannot write snapshot {folder}: {(error.strerror or str(error)).lower()}; "
            "free some space or choose another folder"
        ) from error
    except ValueError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise LocalError(f"snapshot {folder} is not written: {error}") from None
    return manifest


def fill_snapshot(
    folder: Path,
    state: SharedState,
    run: str,
    rows: Rows,
    shard_elements: int = SHARD_ELEMENTS,
    term: int = 0,
) -> Manifest:
    """Write a state into an empty folder, the manifest last; when this returns the disk has it. `rows` are the digest
    tables of anchor and velocity. Raises OSError, and ValueError for a state that is not finite."""
    shards = []
    for start in range(0, state.anchor.size, shard_elements):
        stop = min(start + shard_elements, state.anchor.size)
        name = f"shard-{len(shards):05d}.safetensors"
        shards.append(shard_of(name, start, stop, _write_shard(folder / name, state, start, stop)))
    manifest = msgspec.structs.replace(manifest_of(state, run, tuple(shards), *rows), term=term)
    _write_synced(folder / MANIFEST, manifests.encode(manifest))
    sync_folder(folder)
    return manifest


def manifest_of(
    state: SharedState,
    run: str,
    shards: tuple[Shard, ...],
    anchor: tuple[str, ...],
    velocity: tuple[str, ...],
) -> Manifest:
    """The manifest of a state with these digest tables."""
    return manifests.sealed(
        Manifest(
            run=run,
            version=state.version,
            round=state.round,
            step=state.step,
            numel=state.numel,
            digest=manifests.digest_of(anchor, velocity),
            anchor=anchor,
            velocity=velocity,
            shards=shards,
        )
    )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a snapshot, checked against itself. Raises LocalError, naming the file and what to do."""
    path = folder / MANIFEST
    with opened(path) as file:
        data = file.read(_MAX_MANIFEST_BYTES + 1)
    if len(data) > _MAX_MANIFEST_BYTES:
        raise damaged(path, f"it has more than {_MAX_MANIFEST_BYTES} bytes")
    try:
        return manifests.decode(data)
    except ValueError as error:
        raise damaged(path, str(error)) from None


def read_snapshot(folder: Path, manifest: Manifest | None = None) -> LoadedState:
    """Load a snapshot, every byte checked. Raises LocalError, naming the file and what to do."""
    manifest = manifest or read_manifest(folder)
    for shard in manifest.shards:  # before anything is allocated
        with opened(folder / shard.file) as file:
            check_shard(folder / shard.file, file, shard)
    state = LoadedState(
        anchor=np.empty(manifest.numel, dtype=np.float32),
        velocity=np.empty(manifest.numel, dtype=np.float32),
        version=manifest.version,
        round=manifest.round,
        step=manifest.step,
    )
    for shard in manifest.shards:
        with opened(folder / shard.file) as file:
            for values, at in ((state.anchor, shard.anchor_at), (state.velocity, shard.velocity_at)):
                file.seek(at)
                _read_values(folder / shard.file, file, values[shard.start : shard.stop])
    for vector, values in zip(VECTORS, (state.anchor, state.velocity), strict=True):
        for piece, row in enumerate(manifests.rows_of(values)):
            if row != manifest.row(vector, piece):
                raise other_digest(folder, manifest, vector, piece * manifest.piece)
    return state


def read_elements(folder: Path, manifest: Manifest, vector: Vector, start: int, out: Floats) -> None:
    """Fill `out` with elements `start` and on, as they are in the files: nothing is compared with the digest tables.
    Raises LocalError."""
    done = 0
    for span in manifest.spans(vector, start, start + out.size):
        with opened(folder / span.file) as file:
            file.seek(span.offset)
            _read_values(folder / span.file, file, out[done : done + span.size_bytes // VALUE_BYTES])
        done += span.size_bytes // VALUE_BYTES


def other_digest(folder: Path, manifest: Manifest, vector: Vector, start: int) -> LocalError:
    stop = min(start + manifest.piece, manifest.numel)
    return damaged(
        folder, f"elements {start} to {stop} of the {vector} do not have the digest of the manifest"
    )


@contextmanager
def opened(path: Path) -> Generator[BufferedReader, None, None]:
    try:
        with open(path, "rb", opener=open_itself) as file:
            yield file
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise damaged(path, "it is a link, and leads out of its folder for all one knows") from None
        raise damaged(path, f"it cannot be read: {(error.strerror or str(error)).lower()}") from None


def open_itself(path: str, flags: int) -> int:
    """Not what a link leads to: who made the folder may not choose which file of this machine is read; and no pipe,
    which would be waited for."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no plain file", path)
    return fd


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the folder's names."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_hashed(file: BufferedWriter, parts: Iterable[memoryview]) -> str:
    """Write, and wait until the disk has it; returns the SHA-256. The disk is kept at work meanwhile: the kernel is
    told at each chunk to begin with it, and keeps no page that nobody will read. A thread hashes a chunk while this one
    writes it: one after the other would be half as fast as a good disk."""
    sha = hashlib.sha256()
    at = 0
    with ThreadPoolExecutor(1, thread_name_prefix="atoll-hash") as hasher:
        for part in parts:
            for begin in range(0, len(part), _CHUNK_BYTES):
                chunk = part[begin : begin + _CHUNK_BYTES]
                hashed = hasher.submit(sha.update, chunk)
                file.write(chunk)
                file.flush()
                os.posix_fadvise(file.fileno(), at, len(chunk), os.POSIX_FADV_DONTNEED)
                at += len(chunk)
                hashed.result()
    os.fsync(file.fileno())
    return sha.hexdigest()


def _write_shard(path: Path, state: SharedState, start: int, stop: int) -> str:
    """Returns the SHA-256 of what was written."""

    def parts() -> Iterator[memoryview]:
        yield memoryview(shard_header(start, stop))
        for vector, values in zip(VECTORS, (state.anchor, state.velocity), strict=True):
            for first in range(start, stop, kernels.PIECE):
                piece = values[first : min(first + kernels.PIECE, stop)]
                if not math.isfinite(kernels.squared_norm(piece)):
                    raise ValueError(f"the {vector} of version {state.version} is not finite")
                yield piece.astype("<f4", copy=False).data.cast("B")

    with path.open("xb") as file:
        return write_hashed(file, parts())


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def check_shard(path: Path, file: BufferedReader, shard: Shard, *, hashed: bool = True) -> None:
    """Size, hash (if `hashed`, of all of it), and that the safetensors header says what the manifest says."""
    size = os.fstat(file.fileno()).st_size
    if size != shard.size_bytes:
        raise damaged(path, f"it has {size} bytes and should have {shard.size_bytes}")
    if hashed and shard.sha256 and hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
        raise damaged(path, "its SHA-256 is not that of the manifest")
    file.seek(0)
    prefix = file.read(_LENGTH.size)
    length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else 0
    if length > min(_MAX_HEADER_BYTES, size):
        raise damaged(path, "its header has no length")
    try:
        entries = msgspec.json.decode(file.read(length), type=dict[str, Any])
        for vector, at in (("anchor", shard.anchor_at), ("velocity", shard.velocity_at)):
            entry, numel = entries[vector], shard.stop - shard.start
            first = at - _LENGTH.size - length
            if entry != {
                "dtype": "F32",
                "shape": [numel],
                "data_offsets": [first, first + numel * VALUE_BYTES],
            }:
                raise damaged(path, f"its header and the manifest differ about the {vector}")
    except (msgspec.MsgspecError, KeyError):
        raise damaged(path, "its header is no safetensors header of anchor and velocity") from None


def _read_values(path: Path, file: BufferedReader, out: Floats) -> None:
    got = file.readinto(out.data.cast("B"))
    if got != out.nbytes:
        raise damaged(path, "it ends too early")
    if sys.byteorder == "big":
        out.byteswap(inplace=True)


def damaged(path: Path, what: str) -> LocalError:
    return LocalError(
        f"snapshot file {path} is damaged or unfinished: {what}; use another snapshot, or copy it again"
    )
