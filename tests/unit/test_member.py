"""The member machine where no scenario looks: what the training thread must not do, and refusals."""

from __future__ import annotations

import msgspec
import pytest

from atoll.membership import member
from atoll.membership.desk import Desk
from atoll.membership.member import MemberState, Phase
from atoll.membership.messages import (
    Applied,
    Declare,
    Freeze,
    Ready,
    Reduce,
    Refused,
    Verdict,
    View,
    Vote,
)
from atoll.membership.settings import Timeouts
from atoll.membership.steps import (
    Connected,
    CoordinatorSaid,
    Fail,
    MemberEvent,
    RequestFreeze,
    Send,
    Tick,
    TrainerSaid,
)
from atoll.values import Contribution, Lane, OpId, Plan, TransferStats

DECLARE = Declare((), {}, (), 0, 0, "d0", 0)
READY = Ready(0, 0, "d0", 10, 1, 1.0, True)


def play(*events: MemberEvent) -> MemberState:
    state = member.start("a", Timeouts(), 0.0).state
    for event in events:
        step = member.step(state, event, 0.1)
        assert step.reason
        state = step.state
    return state


def started() -> MemberState:
    view = View(term=1, version=0, round=0, members=("a",), started=True, reason="go")
    return play(Connected(1), TrainerSaid(DECLARE), CoordinatorSaid(view))


def test_it_trains_in_local_only() -> None:
    state = started()
    assert state.phase is Phase.LOCAL
    waiting = member.step(state, TrainerSaid(READY), 0.2).state
    assert waiting.phase is Phase.READY
    with pytest.raises(AssertionError, match="ready in phase ready"):
        member.step(waiting, TrainerSaid(READY), 0.3)


def test_ready_on_another_version_is_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError, match="ready on version 3, holds 0"):
        member.step(started(), TrainerSaid(msgspec.structs.replace(READY, version=3)), 0.2)


def test_steps_told_for_another_round_are_not_sent() -> None:
    """Found by schedule 1683: a round was skipped and nobody who heard it is left; all count from the one before."""
    told = msgspec.structs.replace(READY, round=1, round_steps=5)
    assert member.step(started(), TrainerSaid(told), 0.2).state.pending == told
    stale = msgspec.structs.replace(READY, round=0, round_steps=5)
    pending = member.step(started(), TrainerSaid(stale), 0.2).state.pending
    assert pending == msgspec.structs.replace(stale, round=1, round_steps=0)


def test_nothing_is_applied_without_a_verdict() -> None:
    with pytest.raises(AssertionError, match="nothing to apply"):
        member.step(started(), TrainerSaid(Applied(1, "d1")), 0.2)


def test_refused_ends_it() -> None:
    step = member.step(started(), CoordinatorSaid(Refused("settings", "outer.lr differs")), 0.2)
    assert step.effects == (Fail("refused", "outer.lr differs"),)
    assert member.step(step.state, Tick(), 0.3).effects == ()


def test_a_late_view_renumbers_no_round_that_is_waited_in() -> None:
    waiting = member.step(started(), TrainerSaid(READY), 0.2).state
    view = View(term=1, version=0, round=5, members=("a",), started=True, reason="later")
    assert member.step(waiting, CoordinatorSaid(view), 0.3).state.round == 0
    assert member.step(started(), CoordinatorSaid(view), 0.3).state.round == 5


def test_a_verdict_that_skips_a_version_is_not_obeyed() -> None:
    verdict = Verdict(OpId(1, 1), "committed", 2, "r", (), ("a",), {}, "far ahead")
    waiting = member.step(started(), TrainerSaid(READY), 0.2).state
    step = member.step(waiting, CoordinatorSaid(verdict), 0.3)
    assert isinstance(step.effects[0], Send)
    assert isinstance(step.effects[0].message, Declare), "so that it is told how to catch up"
    assert step.state.phase is Phase.CATCHING_UP


def test_a_freeze_that_comes_while_the_verdict_before_is_applied_is_kept() -> None:
    op = OpId(1, 1)
    plan = Plan(op, 0, ("a",), (Contribution("a", 1),), {}, (Lane("a"),), "fp32", 1.0)
    state = started()
    for event in (
        TrainerSaid(READY),
        CoordinatorSaid(Reduce(plan)),
        TrainerSaid(Vote(op, True, "r", (), "", TransferStats())),
        CoordinatorSaid(Verdict(op, "committed", 1, "r", (), ("a",), {}, "done")),
    ):
        state = member.step(state, event, 0.2).state
    assert state.phase is Phase.APPLYING
    assert member.step(state, CoordinatorSaid(Freeze(1, 2)), 0.3).effects == (RequestFreeze(2),)
    assert member.step(state, CoordinatorSaid(Freeze(1, 1)), 0.3).effects == ()


def test_of_two_skips_that_wait_for_the_trainer_the_later_one_counts() -> None:
    desk = Desk()
    first, last = (
        Verdict(OpId(1, number), "skipped", 0, "", (), ("a",), {}, "no work", ends=number == 2)
        for number in (1, 2)
    )
    desk.lay_order(first)
    desk.lay_order(last)
    assert desk.take_order(0.0) == last
    desk.lay_order(Verdict(OpId(1, 3), "committed", 1, "r", (), ("a",), {}, "done"))
    with pytest.raises(AssertionError, match="before the trainer took"):
        desk.lay_order(last)


def test_a_declaration_waits_for_the_connection() -> None:
    state = member.start("a", Timeouts(), 0.0).state
    quiet = member.step(state, TrainerSaid(DECLARE), 0.1)
    assert quiet.effects == ()
    assert member.step(quiet.state, Connected(1), 0.2).effects == (Send("", DECLARE),)
