"""One save: from the staged files to a verified version in the place. Then `latest` moves, and old versions go."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from atoll.checkpoint.folder import CheckpointFolder, Found, OwnManifest
from atoll.checkpoint.retention import to_remove
from atoll.checkpoint.writer.orders import Failed, Save, Saved
from atoll.errors import LocalError
from atoll.state import manifest as manifests
from atoll.state.manifest import MANIFEST, Manifest
from atoll.state.snapshot import LoadedState, fill_snapshot
from atoll.state.verify import verify_snapshot

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class _Staged:
    """What was staged, as mapped memory: it may lose its names from now on."""

    manifest: Manifest
    shared: LoadedState
    own: memoryview
    own_state: dict[str, object] | None


def save(order: Save) -> Saved | Failed:
    """Carry out an order. Never raises for what a disk or a place does."""
    try:
        staged = _open(order)
        folder = CheckpointFolder(Path(order.place))
        with folder.turn():
            return _save(order, staged, folder)
    except OSError as error:
        what = f" ({error.filename})" if error.filename else ""
        return Failed(version=order.version, reason=(error.strerror or str(error)).lower() + what)
    except (LocalError, ValueError) as error:
        return Failed(version=order.version, reason=str(error))


def _save(order: Save, staged: _Staged, folder: CheckpointFolder) -> Saved:
    began_s = time.monotonic()
    folder.sweep()
    if staged.own_state is not None:  # first: a version that is there has that of who wrote it
        own = OwnManifest(
            run=order.run,
            peer=order.peer,
            version=order.version,
            digest=order.digest,
            files=(),
            state=staged.own_state,
        )
        folder.write_own(own, _chunks(staged.own), len(staged.own))
    shared_bytes = 0
    if not _is_there(folder, order):
        folder.delete(order.version)
        rows = staged.manifest.anchor, staged.manifest.velocity
        with folder.draft(folder.shared(order.version)) as partial:
            written = fill_snapshot(partial, staged.shared, order.run, rows, term=order.term)
        shared_bytes = sum(shard.size_bytes for shard in written.shards)
    written_s = time.monotonic()
    try:
        verified = verify_snapshot(folder.shared(order.version))
        if staged.own_state is not None:
            folder.read_own(order.peer, order.version)
    except LocalError:
        folder.delete(
            order.version
        )  # found while the run still has the good bytes: the next save is another try
        raise
    verified_s = time.monotonic()
    newest = folder.versions()[0]
    good = Found(verified.term, verified.version, verified.digest)
    if good >= newest:
        folder.set_latest(verified)
    removed = _retain(order, folder, good)
    return Saved(
        version=order.version,
        shared_bytes=shared_bytes,
        own_bytes=len(staged.own),
        write_s=written_s - began_s,
        verify_s=verified_s - written_s,
        removed=tuple(removed),
    )


def _is_there(folder: CheckpointFolder, order: Save) -> bool:
    """Whether another peer has written this very state already."""
    return any(each.version == order.version and each.digest == order.digest for each in folder.versions())


def _retain(order: Save, folder: CheckpointFolder, good: Found) -> list[int]:
    found = folder.versions()
    damaged = set(folder.all_versions()) - {each.version for each in found}
    removed = to_remove(found, good, damaged, keep_last=order.keep_last, keep_every=order.keep_every)
    for version in removed:
        folder.delete(version)
    left = {each.version for each in folder.versions()}
    folder.delete_own(
        sorted(v for v in folder.own_versions_of_all() - left if v < good.version or v in removed)
    )
    return removed


def _open(order: Save) -> _Staged:
    """Raises OSError, and ValueError if what is staged is not what was ordered."""
    manifest = manifests.decode((Path(order.snapshot) / MANIFEST).read_bytes())
    if (manifest.version, manifest.digest) != (order.version, order.digest):
        raise ValueError(
            f"version {manifest.version} is staged with digest {manifest.digest[:12]}, not as ordered"
        )
    (shard,) = manifest.shards  # staging has one
    memory = _mapped(Path(order.snapshot) / shard.file, shard.size_bytes)
    anchor, velocity = (
        np.frombuffer(memory, dtype="<f4", count=manifest.numel, offset=at)
        for at in (shard.anchor_at, shard.velocity_at)
    )
    shared = LoadedState(anchor, velocity, manifest.version, manifest.round, manifest.step)
    if not order.state_bytes:
        return _Staged(manifest, shared, memoryview(b""), None)
    own = _mapped(Path(order.own), order.own_bytes + order.state_bytes)
    state = msgspec.json.decode(own[order.own_bytes :], type=dict[str, object])
    return _Staged(manifest, shared, own[: order.own_bytes], state)


def _mapped(path: Path, size_bytes: int) -> memoryview:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < size_bytes:
            raise ValueError(f"{path} has fewer than {size_bytes} bytes")
        return memoryview(mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ))


def _chunks(data: memoryview) -> Iterator[memoryview]:
    for at in range(0, len(data), _CHUNK_BYTES):
        yield data[at : at + _CHUNK_BYTES]
