"""Staging: the state is copied once into one of two slots that are used again and again.

A slot is a folder with one shard whose room is taken from the system once, at the latest when it is first used, so
copies find their pages in place and no full disk in the middle. It is published as a snapshot by renaming it, and loses
that name before a byte of it is written again. So whoever read a part, and then still finds the name, has read unmixed
bytes; names are never used twice (`recovery.held`). SHA-256 is left out: the digest tables say what each piece must be.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from atoll import kernels, log
from atoll.kernels import Table
from atoll.recovery import inner as inners
from atoll.recovery.held import INNER_DATA, INNER_HEAD, SNAPSHOTS, HeldSnapshot
from atoll.state import manifest as manifests
from atoll.state.elsewhere import Elsewhere, OwnBytes, Put
from atoll.state.manifest import MANIFEST, VALUE_BYTES, VECTORS, Manifest, Shard
from atoll.state.snapshot import SharedState, manifest_of, shard_header, shard_of

NUM_SLOTS: Final = 2
OWN: Final = "own"

SLACK_BYTES: Final = 1 << 20
"""What headers and a manifest take at most."""

_SHARD = "shard-00000.safetensors"
_POPULATE_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23

_log = log.get(__name__)


def staged_bytes(numel: int, inner_bytes: int = 0) -> int:
    """What both slots take for a state of `numel` elements and an inner state of `inner_bytes`, at most."""
    return NUM_SLOTS * (len(VECTORS) * numel * VALUE_BYTES + inner_bytes + SLACK_BYTES)


@dataclass(eq=False, slots=True)
class _Slot:
    """A folder under its present name, the snapshot that is published in it, and its shard as memory or file."""

    folder: Path
    held: HeldSnapshot | None = None
    manifest: Manifest | None = None
    memory: mmap.mmap | None = None
    size_bytes: int = 0
    pinned: bool = False


class Slots:
    """The slots of one staging folder. Used on the training thread."""

    def __init__(self, folder: Path, run: str, mapped: bool) -> None:
        """`mapped`: the folder is RAM, and written as memory. A file on a disk is not: a disk that fails at the wrong
        moment would end the process."""
        self._folder, self._run, self._mapped = folder, run, mapped
        self._generation = itertools.count(1)
        self._slots: list[_Slot] = []  # the one to be written next comes first
        for number in range(NUM_SLOTS):
            self._slots.append(_Slot(folder / SNAPSHOTS / f".slot-{number}"))
            self._slots[-1].folder.mkdir(parents=True)

    @property
    def versions(self) -> tuple[int, ...]:
        """What is staged, the oldest stage first."""
        return tuple(slot.held.version for slot in self._slots if slot.held is not None)

    def reserve(self, numel: int) -> None:
        """Take the room of both slots now, for a state of `numel` elements. Raises OSError if there is none."""
        for slot in self._slots:
            os.close(_shard_with_room(slot, shard_of(_SHARD, 0, numel), self._mapped))

    def stage(
        self,
        state: SharedState,
        tables: Sequence[Table] | None = None,
        inner: bytes = b"",
        put: Put | None = None,
    ) -> Manifest:
        """Copy `state`, and beside it this peer's `inner` state if there is any, into a slot and publish it, in place
        of the older one. A version that is staged already, with these bits, stays as it is. `tables` are its digest
        tables, where they are known: then it is only copied. A state of several ranks has tables, and is `put`. Raises
        OSError if there is no room; what was staged in the other slot stays."""
        for slot in self._slots:
            if slot.manifest is not None and _same(slot.manifest, state, tables):
                return slot.manifest
        slot = next(each for each in self._slots if not each.pinned)
        self._withdraw(slot)
        manifest = self._fill(slot, state, tables, put)
        _put_inner(slot.folder, state.version, inner)
        held = HeldSnapshot(state.version, next(self._generation))
        published = self._folder / held.folder
        slot.folder.rename(published)
        slot.folder, slot.held, slot.manifest = published, held, manifest
        self._slots.remove(slot)
        self._slots.append(slot)
        return manifest

    def pin(self, manifest: Manifest) -> Path:
        """The folder of what `stage` gave, which stays until `unpin`: it is being saved. One at a time: the other slot
        is there for those who catch up."""
        assert not any(slot.pinned for slot in self._slots), "one save at a time"
        slot = next(each for each in self._slots if each.manifest is manifest)
        slot.pinned = True
        return slot.folder

    def unpin(self) -> None:
        for slot in self._slots:
            slot.pinned = False

    def _withdraw(self, slot: _Slot) -> None:
        """No reader takes it for a snapshot from here on."""
        if slot.held is not None:
            draft = self._folder / SNAPSHOTS / f".slot-{slot.held.generation + NUM_SLOTS}"
            slot.folder.rename(draft)
            slot.folder, slot.held, slot.manifest = draft, None, None

    def _fill(
        self, slot: _Slot, state: SharedState, tables: Sequence[Table] | None, put: Put | None
    ) -> Manifest:
        shard = shard_of(_SHARD, 0, state.numel)
        fd = _shard_with_room(slot, shard, self._mapped)
        try:
            if put is not None:
                assert tables is not None, "who puts a state knows its tables"
                put(slot.folder / _SHARD, shard.anchor_at, shard.velocity_at)
                anchor, velocity = (tuple(manifests.table_rows(table)) for table in tables)
                return self._write_manifest(slot, state, shard, anchor, velocity)
            known = (None, None) if tables is None else tables
            anchor = _copy(slot, fd, state.anchor, shard.anchor_at, known[0])
            velocity = _copy(slot, fd, state.velocity, shard.velocity_at, known[1])
        finally:
            os.close(fd)
        return self._write_manifest(slot, state, shard, anchor, velocity)

    def _write_manifest(
        self,
        slot: _Slot,
        state: SharedState,
        shard: Shard,
        anchor: tuple[str, ...],
        velocity: tuple[str, ...],
    ) -> Manifest:
        manifest = manifest_of(state, self._run, (shard,), anchor, velocity)
        (slot.folder / MANIFEST).write_bytes(manifests.encode(manifest))
        return manifest


def _shard_with_room(slot: _Slot, shard: Shard, mapped: bool) -> int:
    """The slot's shard, open and with its header in place."""
    fd = os.open(slot.folder / _SHARD, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if slot.size_bytes != shard.size_bytes:
            _take_room(slot, fd, shard.size_bytes, mapped)
            _write(slot, fd, memoryview(shard_header(shard.start, shard.stop)), 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def _take_room(slot: _Slot, fd: int, size_bytes: int, mapped: bool) -> None:
    slot.memory, slot.size_bytes = None, 0
    os.ftruncate(fd, 0)
    os.posix_fallocate(fd, 0, size_bytes)
    if mapped:
        slot.memory = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED)
        _populate(slot.memory)
        slot.memory.madvise(mmap.MADV_DONTFORK)  # workers of a data loader have no use for it
    slot.size_bytes = size_bytes


def _populate(memory: mmap.mmap) -> None:
    """Have all pages in place. In slices: the interpreter's lock is held meanwhile, and heartbeats need a turn."""
    for start in range(0, len(memory), _POPULATE_BYTES):
        size = min(_POPULATE_BYTES, len(memory) - start)
        try:
            memory.madvise(_MADV_POPULATE_WRITE, start, size)
        except OSError:  # a kernel before 5.14
            memory[start : start + size] = bytes(size)


def _put_inner(folder: Path, version: int, inner: bytes) -> None:
    """What does not fit costs only those who want an inner state: they begin with a fresh one."""
    (folder / INNER_HEAD).unlink(missing_ok=True)
    (folder / INNER_DATA).unlink(missing_ok=True)
    if not inner:
        return
    head = inners.head_of(version, np.frombuffer(inner, dtype=np.uint8))
    try:
        (folder / INNER_DATA).write_bytes(inner)
        (folder / INNER_HEAD).write_bytes(msgspec.json.encode(head))
    except OSError as error:
        (folder / INNER_HEAD).unlink(missing_ok=True)
        (folder / INNER_DATA).unlink(missing_ok=True)
        _log.warning("the inner state of version %d is not staged: %s", version, error)


class OwnSlot:
    """A file for the own part of a save, used again and again; its room is taken when it grows."""

    def __init__(self, folder: Path, mapped: bool) -> None:
        self._slot, self._mapped = _Slot(folder / OWN), mapped

    def reserve(self, size_bytes: int) -> None:
        """Take room for so many bytes now. Raises OSError if there is none."""
        os.close(self._with_room(size_bytes))

    def fill(self, parts: Sequence[OwnBytes]) -> Path:
        """Write these bytes one after the other. Raises OSError if there is no room. The file may be longer."""
        size_bytes = sum(part.nbytes for part in parts)
        fd = self._with_room(size_bytes)
        try:
            at = 0
            for part in parts:
                if isinstance(part, Elsewhere):
                    part.put(self._slot.folder, at)
                else:
                    _write(self._slot, fd, part, at)
                at += part.nbytes
        finally:
            os.close(fd)
        return self._slot.folder

    def _with_room(self, size_bytes: int) -> int:
        fd = os.open(self._slot.folder, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if self._slot.size_bytes < size_bytes:
                _take_room(self._slot, fd, size_bytes, self._mapped)
        except OSError:
            os.close(fd)
            raise
        return fd


def _same(manifest: Manifest, state: SharedState, tables: Sequence[Table] | None) -> bool:
    """Whether a staged snapshot is this state, to the bit."""
    if (manifest.version, manifest.round, manifest.step) != (state.version, state.round, state.step):
        return False
    tables = tables or [kernels.digest_pieces(values) for values in (state.anchor, state.velocity)]
    rows = [tuple(manifests.table_rows(table)) for table in tables]
    return rows == [manifest.anchor, manifest.velocity]


def _copy(
    slot: _Slot, fd: int, values: kernels.Floats, at: int, table: Table | None = None
) -> tuple[str, ...]:
    """Write a vector; its digest table. Piece by piece, so that the second reader finds the values in the cache."""
    rows: list[str] = [] if table is None else manifests.table_rows(table)
    for start in range(0, values.size, kernels.PIECE):
        part = values[start : start + kernels.PIECE]
        if table is None:
            rows += manifests.rows_of(part, start)
        _write(slot, fd, part.astype("<f4", copy=False).data.cast("B"), at + start * VALUE_BYTES)
    return tuple(rows)


def _write(slot: _Slot, fd: int, data: memoryview, at: int) -> None:
    if slot.memory is not None:
        slot.memory[at : at + len(data)] = data
        return
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)
