"""The journal: what was appended comes back; a torn tail goes, damage is named, a second owner is refused."""

from __future__ import annotations

import errno
import logging
import os
import random
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.errors import LocalError
from atoll.membership.journal import JournalFile, _frame
from atoll.membership.messages import Verdict
from atoll.membership.steps import JournalRecord, PlanMade, RunDefined, StateDigest, TermRaised, VerdictMade
from atoll.values import Contribution, OpId

OP = OpId(1, 2, 0, 3)
RECORDS: tuple[JournalRecord, ...] = (
    TermRaised(1, b"k" * 32),
    RunDefined((("w", (2, 3), "float32"),), {"outer.lr": 0.7, "model.tie": None}, "d0", ("a", "b")),
    PlanMade(OP, ("a", "b"), ("a",)),
    VerdictMade(
        Verdict(
            OP, "committed", 1, "d1", (Contribution("a", 1),), ("a", "b"), {"b": "no steps"}, "all voted"
        ),
        (0.5,),
    ),
    StateDigest(1, "d2"),
)


@contextmanager
def opened(path: Path, run: str = "run") -> Iterator[JournalFile]:
    journal = JournalFile(path, run)
    try:
        yield journal
    finally:
        journal.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "run.journal"


@pytest.fixture
def written(path: Path) -> Path:
    with opened(path) as journal:
        for record in RECORDS:
            journal.append(record)
    return path


def records_of(path: Path) -> tuple[JournalRecord, ...]:
    with opened(path) as journal:
        return journal.records


def test_a_new_journal_is_empty_and_private(path: Path) -> None:
    assert records_of(path) == ()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_journal_that_others_can_read_becomes_private(written: Path) -> None:
    written.chmod(0o644)
    assert records_of(written) == RECORDS
    assert stat.S_IMODE(written.stat().st_mode) == 0o600


def test_records_come_back_in_order_and_appending_goes_on(written: Path) -> None:
    with opened(written) as journal:
        assert journal.records == RECORDS
        journal.append(TermRaised(2, b"k" * 32))
    assert records_of(written) == (*RECORDS, TermRaised(2, b"k" * 32))


def test_a_record_is_in_the_file_and_synced_when_append_returns(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced_bytes: list[int] = []
    real_fsync = os.fsync

    def fsync(fd: int) -> None:
        real_fsync(fd)
        synced_bytes.append(os.fstat(fd).st_size)

    with opened(path) as journal:
        monkeypatch.setattr(os, "fsync", fsync)
        for record in RECORDS:
            journal.append(record)
            assert synced_bytes[-1] == path.stat().st_size
    assert synced_bytes == sorted(set(synced_bytes))


def test_every_torn_tail_is_dropped_with_a_log_line(written: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = written.read_bytes()
    with opened(written.with_name("shorter")) as journal:
        for record in RECORDS[:-1]:
            journal.append(record)
    kept = written.with_name("shorter").stat().st_size
    for size in range(kept, len(whole)):
        written.write_bytes(whole[:size])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert records_of(written) == RECORDS[:-1]
        assert written.stat().st_size == kept
        expected = [f"journal {written}: dropped a torn record of {size - kept} bytes at offset {kept}"]
        assert caplog.messages == (expected if size > kept else [])


@pytest.mark.parametrize("tail", [b"\0" * 300, b"\xa7ATJ", b"garbage"], ids=["zeros", "mark", "garbage"])
def test_a_tail_that_is_no_record_is_dropped(written: Path, tail: bytes) -> None:
    written.write_bytes(written.read_bytes() + tail)
    with opened(written) as journal:
        assert journal.records == RECORDS
        journal.append(StateDigest(2, "d3"))
    assert records_of(written) == (*RECORDS, StateDigest(2, "d3"))


def test_a_flipped_bit_anywhere_before_the_last_record_is_damage(written: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    whole = written.read_bytes()
    last = whole.rindex(b"\xa7ATJ")
    for _ in range(300):
        at = rng.randrange(last)
        written.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
        with pytest.raises(LocalError, match=r"journal .*run\.journal is damaged at offset \d+") as caught:
            JournalFile(written, "run")
        offset = int(str(caught.value).split("offset ")[1].split(" ")[0])
        assert offset <= at


def test_a_sound_frame_that_is_no_record_is_damage(written: Path) -> None:
    written.write_bytes(written.read_bytes() + _frame(b"\x81\xa1x\x01"))
    with pytest.raises(LocalError, match="is damaged at offset"):
        JournalFile(written, "run")


def test_a_second_owner_is_refused_until_the_first_closes(written: Path) -> None:
    with opened(written), pytest.raises(LocalError, match="is in use by another coordinator") as caught:
        JournalFile(written, "run")
    assert caught.value.exit_code == 3
    assert records_of(written) == RECORDS


def test_the_journal_of_another_run_is_refused(written: Path) -> None:
    with pytest.raises(LocalError, match="belongs to run 'run', not 'other'"):
        JournalFile(written, "other")
    assert records_of(written) == RECORDS


def test_no_room_on_the_disk_leaves_whole_records(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = written.stat().st_size
    real_pwrite = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if offset > size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_pwrite(fd, data[:7], offset)

    with opened(written) as journal:
        monkeypatch.setattr(os, "pwrite", pwrite)
        with pytest.raises(
            LocalError, match=r"cannot write to journal .* \(No space left on device\); make room"
        ):
            journal.append(StateDigest(2, "d3"))
        monkeypatch.undo()
        assert written.stat().st_size == size
        journal.append(StateDigest(3, "d4"))
    assert records_of(written) == (*RECORDS, StateDigest(3, "d4"))


def test_a_path_that_cannot_be_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=f"cannot open journal {tmp_path}"):
        JournalFile(tmp_path, "run")


def test_what_is_no_regular_file_is_no_journal(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/full"), Path("/dev/zero"), tmp_path / "pipe"):
        with pytest.raises(LocalError, match=f"journal {path} is no regular file; name another .*--journal"):
            JournalFile(path, "run")
