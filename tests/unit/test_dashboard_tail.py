"""Events of many processes are read while they are written, and merged in order of time at the end."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from atoll import events
from atoll.dashboard.tail import EventTail, merge_events
from atoll.events import JsonLinesSink


def test_new_events_of_all_files_in_order_of_time(tmp_path: Path) -> None:
    one, two = JsonLinesSink(tmp_path / "one.jsonl"), JsonLinesSink(tmp_path / "two.jsonl")
    tail = EventTail(tmp_path)
    assert tail.read() == []
    one(3.0, "one", events.RoundSkipped(1, "b"))
    two(2.0, "two", events.RoundSkipped(0, "a"))
    assert [(each.wall_time_s, each.source) for each in tail.read()] == [(2.0, "two"), (3.0, "one")]
    assert tail.read() == []
    one(4.0, "one", events.RoundSkipped(2, "c"))
    assert [each.event for each in tail.read()] == [events.RoundSkipped(2, "c")]
    one.close()
    two.close()


def test_folders_below_are_not_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint in the making lies there, and is gone between one look and the next."""
    (tmp_path / "checkpoints" / "shared" / ".00000135.partial").mkdir(parents=True)
    sink = JsonLinesSink(tmp_path / "one.jsonl")
    sink(1.0, "one", events.RoundSkipped(0, "a"))
    sink.close()
    scan = os.scandir

    def scan_run_folder_alone(path: str) -> object:
        if Path(path) != tmp_path:
            raise FileNotFoundError(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_run_folder_alone)
    assert len(EventTail(tmp_path).read()) == 1


def test_torn_lines_and_unknown_events_wait_or_pass(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    whole = b'{"wall_time_s":1.0,"source":"one","event":{"type":"RoundSkipped","round":0,"reason":"a"}}\n'
    unknown = b'{"wall_time_s":2.0,"source":"one","event":{"type":"OfTomorrow","x":1}}\n'
    path.write_bytes(whole + unknown + whole[:30])
    tail = EventTail(tmp_path)
    assert len(tail.read()) == 1
    path.write_bytes(whole + unknown + whole)
    assert len(tail.read()) == 1


def test_numbers_that_are_not_finite_are_read_as_nan(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "one.jsonl")
    sink(1.0, "one", events.TrainingStep(1, math.nan, 1, 1.0, 1.0, math.inf, skipped=True))
    sink.close()
    (seen,) = EventTail(tmp_path).read()
    assert isinstance(seen.event, events.TrainingStep)
    assert math.isnan(seen.event.loss)
    assert math.isnan(seen.event.grad_norm)


def test_merged_lines_are_those_that_were_written(tmp_path: Path) -> None:
    one, two = JsonLinesSink(tmp_path / "one.jsonl"), JsonLinesSink(tmp_path / "two.jsonl")
    for number in range(3):
        one(2.0 * number, "one", events.RoundSkipped(number, "ü"))
        two(2.0 * number + 1, "two", events.PeerKilled("peer", "SIGKILL"))
    one.close()
    two.close()
    with (tmp_path / "two.jsonl").open("ab") as torn:
        torn.write(b'{"wall_time_s":9')
    merged = merge_events(tmp_path)
    lines = merged.read_bytes().splitlines(keepends=True)
    assert [json.loads(line)["source"] for line in lines] == ["one", "two"] * 3
    assert lines[::2] == (tmp_path / "one.jsonl").read_bytes().splitlines(keepends=True)
    assert merge_events(tmp_path).read_bytes() == b"".join(lines)  # itself left out
