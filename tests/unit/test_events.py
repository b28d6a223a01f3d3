"""The event file: whole lines, and one line to the user when there is no room for more."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.dashboard.words import sentence
from atoll.errors import LocalError
from atoll.events import (
    Event,
    FaultPlayed,
    InnerStateMissed,
    InnerStateTaken,
    JsonLinesSink,
    ModelSaved,
    PeerKilled,
    RunEnded,
    StartWeightsMissed,
    read_events,
)

KILLED = PeerKilled(peer="a", signal="SIGKILL")
ENDED = RunEnded(reason="over", exit_code=0)


def at_most(size: int, then: int = 0) -> Callable[[int, bytes], int]:
    """An `os.write` that takes so many bytes a call; `then`, if not 0: the errno of the second call."""
    real, calls = os.write, []

    def write(fd: int, data: bytes) -> int:
        calls.append(len(data))
        if then and len(calls) > 1:
            raise OSError(then, os.strerror(then))
        return real(fd, bytes(data)[:size])

    return write


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = JsonLinesSink(tmp_path / "events.jsonl")
    with monkeypatch.context() as patched:
        patched.setattr("atoll.events.os.write", at_most(7))
        sink(1.0, "me", KILLED)
        sink(2.0, "me", ENDED)
    sink.close()
    assert [event for _, _, event in read_events(tmp_path / "events.jsonl")] == [KILLED, ENDED]


def test_no_space_names_the_file_and_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    sink = JsonLinesSink(path)
    with pytest.raises(LocalError) as raised:
        sink(1.0, "me", KILLED)
    assert str(raised.value) == (
        f"cannot write events to {path}: no space left on device; make room there or set local.out"
    )
    sink(2.0, "me", ENDED)  # said once: whoever says goodbye now can do so
    sink.close()


def test_a_line_that_did_not_fit_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    first = JsonLinesSink(path)
    first(1.0, "me", KILLED)
    with monkeypatch.context() as patched:
        patched.setattr("atoll.events.os.write", at_most(7, then=errno.ENOSPC))
        with pytest.raises(LocalError):
            first(2.0, "me", ModelSaved(path="x", version=1, digest="y"))
    first.close()
    second = JsonLinesSink(path)  # the same process, started again once there is room
    second(3.0, "me", ENDED)
    second.close()
    assert [event for _, _, event in read_events(path)] == [KILLED, ENDED]


def test_a_folder_that_is_none_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match=r"cannot write events to .*file/events\.jsonl: .*; make room there"):
        JsonLinesSink(tmp_path / "file" / "events.jsonl")


@pytest.mark.parametrize(
    "event",
    [
        FaultPlayed("stop", "bern", 1.25),
        FaultPlayed("leave", "bern"),
        FaultPlayed("join", "chaos-1"),
        InnerStateTaken(donor="aarau", version=7, size_bytes=1 << 33),
        InnerStateMissed(reason="no donor staged one with the snapshot"),
        StartWeightsMissed(path="/models/base"),
    ],
    ids=str,
)
def test_what_is_written_is_read_and_told_in_a_sentence(tmp_path: Path, event: Event) -> None:
    sink = JsonLinesSink(tmp_path / "events.jsonl")
    sink(1.0, "me", event)
    sink.close()
    ((_, line, read),) = read_events(tmp_path / "events.jsonl")
    assert read == event
    assert line.event["type"] == type(event).__name__
    told = sentence("me", event)
    assert told is not None
    assert (
        str(
            next(iter(line.event[name] for name in ("peer", "donor", "reason", "path") if name in line.event))
        )
        in told
    )


LIMITED = """
import resource, signal, sys
from pathlib import Path
from atoll.errors import LocalError
from atoll.events import JsonLinesSink, PeerKilled
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
sink = JsonLinesSink(Path(sys.argv[1]))
try:
    while True:
        sink(1.0, "me", PeerKilled(peer="a", signal="SIGKILL"))
except LocalError as error:
    sys.exit(str(error))
"""


def test_a_real_limit_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert ended.stderr.strip().startswith(f"cannot write events to {path}: file too large")
    whole = path.read_bytes()
    assert whole.endswith(b"\n")
    assert 800 < len(whole) <= 1000
    assert len(list(read_events(path))) == whole.count(b"\n")
