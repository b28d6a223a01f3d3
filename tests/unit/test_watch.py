"""The watch of one rank, with a sibling that a test speaks for: whom it ends, and what it leaves alone."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from atoll.errors import Diverged, SiblingLost
from atoll.mesh import watch
from atoll.mesh.links import Alive, Ended, Link
from atoll.mesh.watch import Watch
from support.slack import SLACK_S

ENDED = Ended(1, "rank 1 of this peer ended: it diverged", 7)


@dataclass
class Seat:
    """A watch of rank 0, and the sibling's end of its one link."""

    watch: Watch
    sibling: Link
    exits: list[int] = field(default_factory=list)
    """Codes with which the watch would have ended the process."""

    def live(self, seconds: float) -> None:
        """The sibling gives signs of life for so long, or until the watch acts."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and not self.exits:
            self.sibling.send(Alive())
            time.sleep(0.05)


@pytest.fixture
def seat(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seat]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    link = Link(accepted)
    made = Seat(Watch(0, 2, {1: link}, dead_s=60.0), Link(dialled))

    def exit_(code: int) -> None:
        made.exits.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", exit_)
    monkeypatch.setattr(watch, "TAKEN_S", 0.5)
    yield made
    made.watch.close(Diverged("the test is over"))
    made.sibling.close()
    link.close()  # a watch that has ended the process closes nothing


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # the stand-in for the exit
def test_a_rank_that_does_not_end_by_itself_is_ended_with_its_sibling(
    seat: Seat, capfd: pytest.CaptureFixture[str]
) -> None:
    seat.sibling.send(ENDED)
    seat.live(watch.GRACE_S + watch.GOODBYE_S + SLACK_S)
    assert seat.exits == [7]
    assert capfd.readouterr().err == f"atoll: error: {ENDED.reason}; rank 0 ends too\n"


def test_a_rank_that_ends_for_a_reason_of_its_own_has_its_own_time(seat: Seat) -> None:
    """All ranks raise the same error at the same line, and then wait for a save; a sibling's word may come first."""
    seat.sibling.send(ENDED)
    with pytest.raises(SiblingLost):
        seat.watch.check_soon()
    seat.watch.tell_end(Diverged("it diverged"))
    seat.live(3 * watch.TAKEN_S)
    assert seat.exits == []


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # the stand-in for the exit
def test_a_rank_that_ends_because_of_its_sibling_has_to_do_so_soon(seat: Seat) -> None:
    seat.sibling.send(ENDED)
    with pytest.raises(SiblingLost) as lost:
        seat.watch.check_soon()
    seat.watch.tell_end(lost.value)
    seat.live(watch.TAKEN_S + watch.GOODBYE_S + SLACK_S)
    assert seat.exits == [7]


def test_a_watch_that_is_closed_writes_to_no_file_that_has_its_numbers_now(
    seat: Seat, tmp_path: Path
) -> None:
    seat.watch.close(Diverged("it diverged"))
    files = [(tmp_path / f"{number}").open("wb") for number in range(8)]
    seat.watch.tell_end(Diverged("again"))
    for file in files:
        file.close()
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0] * len(files)
