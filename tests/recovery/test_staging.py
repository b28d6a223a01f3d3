"""Staging: one copy, published whole; a reader of a slot that is written again never takes mixed bytes for good."""

from __future__ import annotations

import errno
import mmap
import os
import random
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from atoll import kernels
from atoll.recovery import staging
from atoll.recovery.held import look_up
from atoll.recovery.sidecar.files import NotThereError, open_part
from atoll.recovery.staging import OwnSlot, Slots, staged_bytes
from atoll.state.snapshot import LoadedState, read_manifest, read_snapshot
from support.states import assert_same, digest_of

NUMEL = 3000


@pytest.fixture(params=[True, False], ids=["memory", "file"])
def mapped(request: pytest.FixtureRequest) -> bool:
    """How slots are written; whether or not the folder is RAM, the files are the same."""
    return bool(request.param)


def state_at(version: int, numel: int = NUMEL) -> LoadedState:
    """All values are the version: mixed bytes are seen at once."""
    value = np.full(numel, version, dtype=np.float32)
    return LoadedState(value, -value, version, version + 1, version * 10)


def folder_of(root: Path, version: int) -> Path:
    (found,) = [each for each in look_up(root, -1).snapshots if each.version == version]
    return root / found.folder


@pytest.mark.parametrize("numel", [1, 777, kernels.PIECE, kernels.PIECE + 5])
def test_what_is_staged_is_a_snapshot(mapped: bool, tmp_path: Path, numel: int) -> None:
    slots, state = Slots(tmp_path, "run", mapped), state_at(3, numel)
    manifest = slots.stage(state)
    assert_same(read_snapshot(folder_of(tmp_path, 3)), state)
    assert manifest == read_manifest(folder_of(tmp_path, 3))
    assert manifest.digest == digest_of(state)
    assert manifest.shards[0].sha256 == "", "in RAM the tables do"


def test_two_slots_are_used_again_and_again(mapped: bool, tmp_path: Path) -> None:
    slots = Slots(tmp_path, "run", mapped)
    inodes = set()
    for version in range(1, 7):
        slots.stage(state_at(version))
        assert slots.versions == (version - 1, version)[version == 1 :]
        inodes.add(os.stat(folder_of(tmp_path, version) / "shard-00000.safetensors").st_ino)
        assert_same(read_snapshot(folder_of(tmp_path, version)), state_at(version))
    assert len(inodes) == 2
    assert len(list((tmp_path / "snapshots").iterdir())) == 2
    used = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*") if path.is_file())
    assert used <= staged_bytes(NUMEL)


def test_reserved_room_is_all_that_a_stage_takes(mapped: bool, tmp_path: Path) -> None:
    slots, own = Slots(tmp_path, "run", mapped), OwnSlot(tmp_path, mapped)
    slots.reserve(NUMEL)
    own.reserve(NUMEL)

    def blocks() -> dict[str, int]:
        shards = tmp_path.rglob("*.safetensors")
        return {"own": (tmp_path / "own").stat().st_blocks, "shards": sum(f.stat().st_blocks for f in shards)}

    before = blocks()
    assert before["own"] * 512 >= NUMEL
    assert before["shards"] * 512 >= 2 * 8 * NUMEL
    for version in (1, 2):
        slots.stage(state_at(version))
        own.fill([memoryview(bytes([version]) * NUMEL)])
        assert_same(read_snapshot(folder_of(tmp_path, version)), state_at(version))
    assert blocks() == before


def test_room_is_in_place_and_was_not_taken_with_pythons_lock_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gigabyte takes seconds on a busy machine, and a peer that sends no heartbeat for so long is lost."""
    asked: list[int] = []
    slices: list[int] = []

    class Spied(mmap.mmap):
        def __new__(cls, fd: int, size: int, flags: int) -> Spied:
            asked.append(flags)
            return super().__new__(cls, fd, size, flags=flags)

        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            slices.append(length)
            super().madvise(option, start, length)

    monkeypatch.setattr(staging.mmap, "mmap", Spied)
    monkeypatch.setattr(staging, "_POPULATE_BYTES", 1 << 20)
    numel = 4 << 20
    slots = Slots(tmp_path, "run", mapped=True)
    slots.reserve(numel)
    assert asked == [mmap.MAP_SHARED] * 2, "the call keeps the lock: it must not fill the pages too"
    assert max(slices) == 1 << 20, "so does each of these"
    resident = [int(each) for each in re.findall(r"shard-0.*\n(?:.*\n)*?Rss: *(\d+) kB", smaps())]
    assert len(resident) == 2
    assert all(kilobytes << 10 >= 2 * 4 * numel for kilobytes in resident)


def smaps() -> str:
    path = Path("/proc/self/smaps")
    if not path.exists():
        pytest.skip("no /proc here that tells of pages")
    return path.read_text()


def test_a_version_that_is_staged_already_stays(mapped: bool, tmp_path: Path) -> None:
    slots = Slots(tmp_path, "run", mapped)
    slots.stage(state_at(1))
    before = look_up(tmp_path, -1)
    slots.stage(state_at(1))
    assert look_up(tmp_path, -1) == before


def test_a_version_with_other_bits_is_staged_anew(mapped: bool, tmp_path: Path) -> None:
    """As by a peer that stood on wrong bits and took a snapshot."""
    slots, wrong = Slots(tmp_path, "run", mapped), state_at(1)
    wrong.velocity[7] = 9
    slots.stage(wrong)
    slots.stage(state_at(1))
    newest = look_up(tmp_path, -1).snapshots[-1]
    assert_same(read_snapshot(tmp_path / newest.folder), state_at(1))


def test_a_slot_without_room_leaves_the_other_one(
    mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = Slots(tmp_path, "run", mapped)
    slots.stage(state_at(1))

    def no_space(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_space)
        with pytest.raises(OSError, match="No space left"):
            slots.stage(state_at(2))
    assert slots.versions == (1,)
    slots.stage(state_at(2))
    assert slots.versions == (1, 2)
    assert_same(read_snapshot(folder_of(tmp_path, 2)), state_at(2))


def test_a_reader_never_takes_mixed_bytes_for_good(mapped: bool, tmp_path: Path) -> None:
    """As the sidecar reads: part by part, while the slots are written again as fast as may be."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    slots, over, whole, gone = Slots(tmp_path, "run", mapped), threading.Event(), [0], [0]
    numel = 200_000
    slots.stage(state_at(1, numel))

    def read() -> None:
        while not over.is_set():
            held = rng.choice(look_up(tmp_path, -1).snapshots or [None])
            if held is None:
                continue
            try:
                part = open_part(tmp_path, f"/v1/{held.folder}/shard-00000.safetensors", "bytes=4096-804095")
            except NotThereError:
                continue
            try:
                data, done = b"", 0
                while done < part.size_bytes:
                    data += part.read(done, 50_000)
                    done = len(data)
                assert set(np.frombuffer(data, dtype="<f4").tolist()) == {float(held.version)}
                whole[0] += 1
            except NotThereError:
                gone[0] += 1
            finally:
                part.close()

    failures: list[BaseException] = []

    def read_and_tell() -> None:
        try:
            read()
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=read_and_tell)
    reader.start()
    end_s, version = time.monotonic() + 30, 1
    while (whole[0] < 20 or gone[0] < 5) and time.monotonic() < end_s and not failures:
        version += 1
        slots.stage(state_at(version, numel))
        if rng.random() < 0.5:
            time.sleep(0.01)
    over.set()
    reader.join()
    assert not failures, failures
    assert whole[0] >= 20
    assert gone[0] >= 5, "no slot was written again under the reader"
