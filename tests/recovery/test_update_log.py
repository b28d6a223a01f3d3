"""The update log keeps what may be needed, lets the oldest go, and is never worth a failed round."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from atoll.recovery.held import look_up
from atoll.recovery.update_log import UpdateLog
from support.history import History

NUMEL = 1000
UPDATE_BYTES = 2500
"""At most: bytes and head of one update."""


def keep(log: UpdateLog, history: History, count: int, staged: tuple[int, ...] = ()) -> None:
    for _ in range(count):
        update, data = history.commit()
        log.keep(update, data, staged)


def versions_on_disk(folder: Path) -> list[int]:
    return [each.version for each in look_up(folder, -1).updates]


def test_kept_updates_are_found_with_their_bytes(tmp_path: Path) -> None:
    history, log = History(NUMEL), UpdateLog(tmp_path, 1 << 20, 1 << 20)
    keep(log, history, 3)
    assert log.versions == range(1, 4)
    for each in look_up(tmp_path, 1).updates:
        _, data = history.updates[each.version]
        assert (tmp_path / each.data).read_bytes() == data.tobytes()
        assert each.size_bytes == data.size
    assert [each.version for each in look_up(tmp_path, 1).updates] == [2, 3]


def test_the_oldest_go_first(tmp_path: Path) -> None:
    history, log = History(NUMEL), UpdateLog(tmp_path, 3 * UPDATE_BYTES, 0)
    keep(log, history, 10)
    assert log.versions.stop == 11
    assert 1 < log.versions.start <= 9
    assert log.total_bytes <= 3 * UPDATE_BYTES
    assert versions_on_disk(tmp_path) == list(log.versions)
    assert sum(path.stat().st_size for path in (tmp_path / "updates").iterdir()) == log.total_bytes


def test_what_a_staged_snapshot_needs_stays_up_to_the_larger_limit(tmp_path: Path) -> None:
    history, log = History(NUMEL), UpdateLog(tmp_path, 2 * UPDATE_BYTES, 6 * UPDATE_BYTES)
    keep(log, history, 5)
    staged = (log.versions.stop - 1,)
    keep(log, history, 5, staged)
    assert log.versions == range(6, 11), "those before the snapshot went, those after it stayed"
    keep(log, history, 10, staged)
    assert log.versions.start > 6
    assert log.total_bytes <= 2 * UPDATE_BYTES, "once its first update is gone, a snapshot pins nothing"


def test_a_gap_begins_a_new_log(tmp_path: Path) -> None:
    history, log = History(NUMEL), UpdateLog(tmp_path, 1 << 20, 0)
    keep(log, history, 3)
    history.commit()  # while this peer was away
    keep(log, history, 2)
    assert log.versions == range(5, 7)
    assert versions_on_disk(tmp_path) == [5, 6]


def test_a_history_that_was_rolled_back_has_other_names(tmp_path: Path) -> None:
    first, second, log = History(NUMEL, seed=1), History(NUMEL, seed=2), UpdateLog(tmp_path, 1 << 20, 0)
    keep(log, first, 1)
    (old,) = look_up(tmp_path, -1).updates
    keep(log, second, 1)
    (new,) = look_up(tmp_path, -1).updates
    assert (new.version, new.generation > old.generation) == (old.version, True)
    assert (tmp_path / new.data).read_bytes() == second.updates[1][1].tobytes()


def test_an_update_larger_than_the_log_is_not_kept(tmp_path: Path) -> None:
    history, log = History(NUMEL), UpdateLog(tmp_path, 100, 100)
    keep(log, history, 2)
    assert len(log.versions) == 0
    assert versions_on_disk(tmp_path) == []


def test_without_room_fewer_are_kept_and_people_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    history, log = History(NUMEL), UpdateLog(tmp_path, 1 << 20, 0)
    keep(log, history, 1)
    room = [2 * log.total_bytes + 50]
    write = Path.write_bytes

    def write_if_room(path: Path, data: bytes) -> int:
        held = sum(each.stat().st_size for each in (tmp_path / "updates").iterdir())
        if held + len(data) > room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", write_if_room)
    keep(log, history, 4)
    assert log.versions == range(4, 6)
    assert caplog.records == []
    room[0] = 0
    with caplog.at_level(logging.WARNING):
        keep(log, history, 3)
    assert len(log.versions) == 0
    assert [text.partition("for an update")[0] for text in caplog.messages] == [f"no room in {tmp_path} "]
    room[0] = 1 << 20
    keep(log, history, 1)
    assert versions_on_disk(tmp_path) == [9]


def test_any_other_trouble_with_the_disk_is_told(tmp_path: Path) -> None:
    history, log = History(NUMEL), UpdateLog(tmp_path, 1 << 20, 0)
    (tmp_path / "updates").rmdir()
    with pytest.raises(FileNotFoundError):
        keep(log, history, 1)
