"""What a session makes of an operator's wish that its peer leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atoll.diloco.engine_slot import EngineSlot
from atoll.diloco.schedule import OuterSchedule
from atoll.diloco.session import Session
from atoll.errors import Dismissed
from atoll.events import Event, EventLog, RunEnded
from atoll.membership.desk import Desk
from atoll.membership.link import Admission
from atoll.membership.messages import Declare, View
from atoll.membership.settings import Timeouts
from atoll.network.addresses import EngineAddress
from atoll.state.tensors import ModelTensors

WISH = "asked to leave by an operator"


class Seat:
    """A member that is let in at once, and asked to leave when the test says so."""

    def __init__(self) -> None:
        self.desk = Desk()
        self.told: list[Any] = []
        self.asked_to_leave = self.desk.leave_reason
        self.check = self.desk.check
        self.session_key = b"k" * 32

    def declare(self, message: Declare, meanwhile: object = None) -> View:
        return self.view()

    def view(self) -> View:
        return View(term=1, version=0, round=0, members=("a",), started=True, reason="")

    def to_catch_up(self) -> None:
        return None

    def snapshot_due(self) -> None:
        return None

    def progress(self, *told: Any) -> None:
        self.told.append(told)

    def freeze_requested(self, round: int) -> bool:
        return False

    def leave(self, reason: str, done: bool) -> None:
        self.goodbye = (reason, done)

    def close(self) -> None: ...


def seated(seat: Seat, *, steps: int | None = 40, events: list[Event] | None = None) -> Session:
    session = Session(
        run="r",
        peer="a",
        member=seat,  # type: ignore[arg-type]
        admission=Admission(
            settings=None, timeouts=Timeouts(), session_key=b"k" * 32, term=1, seen_as="127.0.0.1"
        ),
        slot=EngineSlot(),
        engine=EngineAddress("127.0.0.1", 0, "127.0.0.1"),
        tensors=ModelTensors([("w", torch.nn.Parameter(torch.zeros(8)))]),
        inner=None,
        total_steps=steps,
        events=EventLog(
            "a", lambda wall_s, source, event: (events if events is not None else []).append(event)
        ),
    )
    schedule = OuterSchedule.constant(20, 0.7, 0.9, True, steps)
    session.open_rounds(schedule, codec="int8", settings={})
    return session


def test_its_batches_end_and_it_says_whose_wish_that_was() -> None:
    seat, events = Seat(), []
    with seated(seat, events=events) as session:
        seen = 0
        for _ in session.batches(range(100), shard=False):
            session.loop.step()
            seen += 1
            if seen == 3:
                seat.desk.lay_leave(WISH)
        assert (seen, session.finished(), session.asked_to_leave) == (3, True, WISH)
    assert seat.goodbye == (WISH, False)
    assert events[-1] == RunEnded(reason=WISH, exit_code=0)


def test_without_a_number_of_steps_too() -> None:
    """Work of the unfinished round is not committed first: the peer is to go now."""
    seat = Seat()
    with seated(seat, steps=None) as session:
        for _ in session.batches(range(5), shard=False):
            session.loop.step()
            seat.desk.lay_leave(WISH)
        assert session.loop.work.steps == 1
    assert seat.goodbye == (WISH, False)


def test_who_is_sent_away_before_the_start_hears_it_as_an_exception() -> None:
    desk = Desk()
    desk.lay_failure(Dismissed(WISH))
    with pytest.raises(Dismissed, match=WISH) as caught:
        desk.wait_membership(1)
    assert caught.value.exit_code == 0


def test_heartbeats_say_how_far_it_is_in_its_round() -> None:
    seat = Seat()
    with seated(seat) as session:
        for _ in range(3):
            session.loop.step()
    assert seat.told[-1] == (3, "local", 3, 20)
