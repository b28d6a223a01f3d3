"""An operator's orders at every moment of a run: what the coordinator machine decides. Transcripts are scenarios."""

from __future__ import annotations

import math

import pytest

from atoll import events
from atoll.membership import coordinator
from atoll.membership.messages import (
    AskToLeave,
    Declare,
    Ended,
    Freeze,
    Leave,
    Ready,
    Reduce,
    Refused,
    Verdict,
)
from atoll.membership.operator import Done, EvictPeer, LeavePeer, StopRun
from atoll.membership.steps import (
    Answer,
    CloseConnection,
    Effect,
    Emit,
    EvictionDecided,
    Finish,
    Journal,
    OperatorSaid,
    PeerArrived,
    PeerDropped,
    Send,
    StopDecided,
)
from support.desk import LAYOUT, SETTINGS, Desk, emitted, finish_of, sent


def effects_of(desk: Desk, request: StopRun | LeavePeer | EvictPeer) -> tuple[Effect, ...]:
    return desk.hear(OperatorSaid(7, request))


def last_verdict(desk: Desk) -> Verdict:
    assert desk.state.verdict is not None
    return desk.state.verdict


def two(**settings: float) -> Desk:
    desk = Desk(start_peers=2, **settings)
    desk.join("a", "b")
    return desk


# ---- stop ------------------------------------------------------------------------------------------------


def test_a_stop_is_on_disk_before_anybody_hears_of_it() -> None:
    kinds = [type(effect) for effect in effects_of(two(), StopRun("enough"))]
    assert kinds.index(Journal) < kinds.index(Emit) < kinds.index(Answer)
    assert kinds.index(Journal) < kinds.index(Send)


def test_a_stop_in_the_inner_loop_closes_the_round_under_the_policy_that_waits() -> None:
    desk = two(policy="wait")
    effects = effects_of(desk, StopRun("enough"))
    assert sent(effects, Freeze) == ["a", "b"]
    desk.ready("a", "b")
    for peer in "ab":
        desk.vote(peer, "r")
    verdict = last_verdict(desk)
    assert (verdict.outcome, verdict.ends) == ("committed", True)
    assert verdict.end_reason == "the run was stopped by an operator: enough"


def test_a_stop_in_an_attempt_lets_it_be_the_last() -> None:
    desk = two()
    desk.ready("a", "b")
    desk.vote("a", "r")
    assert not sent(effects_of(desk, StopRun("")), Freeze)
    desk.vote("b", "r")
    assert last_verdict(desk).ends
    assert last_verdict(desk).end_reason == "the run was stopped by an operator"


def test_a_stop_in_a_failed_attempt_ends_the_run_with_the_next() -> None:
    desk = two()
    desk.ready("a", "b")
    desk.vote("a", "")
    desk.order(StopRun(""))
    desk.vote("b", "")
    assert desk.plan().op.attempt == 1
    for peer in "ab":
        desk.vote(peer, "r")
    assert (last_verdict(desk).outcome, last_verdict(desk).ends) == ("committed", True)


def test_a_stop_while_the_verdict_is_applied_ends_the_run_with_the_next_round() -> None:
    desk = two()
    desk.ready("a", "b")
    for peer in "ab":
        desk.vote(peer, "r")
    assert sent(effects_of(desk, StopRun("")), Freeze) == ["a", "b"]
    assert desk.state.round.number == 2


def test_a_newcomer_to_a_run_that_stops_is_asked_to_freeze_too() -> None:
    desk = two()
    desk.order(StopRun(""))
    desk.hear(PeerArrived("c", "1", "host"))
    effects = desk.said("c", Declare(LAYOUT, SETTINGS, (), 0, 0, "d0", 0))
    assert sent(effects, Freeze) == ["c"]


def test_after_a_stop_the_run_is_done_when_all_have_left() -> None:
    desk = two()
    desk.order(StopRun(""))
    desk.ready("a", "b")
    for peer in "ab":
        desk.vote(peer, "r")
    desk.said("a", Leave("the run was stopped", done=True))
    assert finish_of(desk.said("b", Leave("the run was stopped", done=True))) == 0


def test_a_stop_with_nobody_left_ends_the_run_at_once() -> None:
    desk = two()
    for peer in "ab":
        desk.hear(PeerDropped(peer, "1"))
    desk.wait(2)
    effects = effects_of(desk, StopRun("all machines are gone"))
    assert finish_of(effects) == 0
    again = coordinator.start(desk.settings, desk.journal, b"", None, 0.0)
    assert finish_of(again.effects) == 0


def test_a_stop_after_a_restart_is_not_forgotten() -> None:
    desk = two()
    desk.order(StopRun("enough"))
    again = Desk(tuple(desk.journal), start_peers=2)
    assert again.state.stopping == "the run was stopped by an operator: enough"
    again.join("a", "b")
    assert again.state.round.closed_s is not None


def test_what_was_stopped_before_it_started_does_not_start_with_the_next_coordinator() -> None:
    desk = Desk(start_peers=2)
    desk.join("a")
    desk.hear(PeerArrived("b", "1", "host"))
    effects = effects_of(desk, StopRun(""))
    ended = [each.message for each in effects if isinstance(each, Send) and isinstance(each.message, Ended)]
    assert [message.kind for message in ended] == ["dismissed", "dismissed"]
    assert isinstance(effects[-1], Answer | Finish)
    again = coordinator.start(desk.settings, desk.journal, b"", None, 0.0)
    assert "over already: the run was stopped by an operator" in again.reason


def test_the_same_stop_twice_is_journaled_once() -> None:
    desk = two()
    assert desk.order(StopRun("enough")).ok
    assert desk.order(StopRun("enough")).ok
    assert [each for each in desk.journal if isinstance(each, StopDecided)] == [
        StopDecided("the run was stopped by an operator: enough")
    ]


# ---- leave -----------------------------------------------------------------------------------------------


def test_who_is_asked_to_leave_stays_a_member_until_it_says_goodbye() -> None:
    desk = two()
    effects = effects_of(desk, LeavePeer("b", ""))
    assert sent(effects, AskToLeave) == ["b"]
    assert [record.peer for record in desk.state.members()] == ["a", "b"]
    effects = desk.said("b", Leave("asked to leave by an operator", done=False))
    assert [event.reason for event in emitted(effects, events.PeerLeft)] == ["asked to leave by an operator"]
    assert finish_of(effects) is None


def test_a_wish_to_leave_reaches_a_peer_that_was_away() -> None:
    desk = two()
    desk.hear(PeerDropped("b", "1"))
    effects = effects_of(desk, LeavePeer("b", ""))
    assert sent(effects, AskToLeave) == []
    desk.hear(PeerArrived("b", "1", "host"))
    effects = desk.said("b", Declare(LAYOUT, SETTINGS, (), 0, 0, "d0", 0))
    assert sent(effects, AskToLeave) == ["b"]


def test_a_wish_to_leave_is_not_for_the_next_process_of_that_name() -> None:
    desk = two()
    desk.order(LeavePeer("b", ""))
    desk.said("b", Leave("asked to leave", done=False))
    effects = desk.join("b", incarnation="2")
    assert sent(effects, AskToLeave) == []


def test_who_is_not_there_cannot_leave() -> None:
    assert two().order(LeavePeer("x", "")) == Done(False, "this run has no peer 'x'; its peers are: a, b")


# ---- evict -----------------------------------------------------------------------------------------------


def test_an_eviction_is_on_disk_before_anybody_hears_of_it() -> None:
    effects = effects_of(two(), EvictPeer("b", "broken", 60.0))
    kinds = [type(effect) for effect in effects]
    assert kinds.index(Journal) < kinds.index(Send)
    assert effects[0] == Journal(EvictionDecided("b", "broken", 60.0))
    assert [event.members for event in emitted(effects, events.PeerEvicted)] == [("a",)]


def test_the_evicted_hears_why_and_is_cut_off() -> None:
    effects = effects_of(two(), EvictPeer("b", "broken", 60.0))
    said = Refused("evicted", "'b' was evicted and is refused for another 60 s: broken")
    assert effects.index(Send("b", said)) < effects.index(CloseConnection("b", "1"))


@pytest.mark.parametrize(
    "votes", [(), ("b",), ("a", "c"), ("a", "b")], ids=["none", "its", "others'", "both"]
)
def test_what_the_evicted_sent_is_in_no_sum_that_is_committed_later(votes: tuple[str, ...]) -> None:
    desk = Desk(start_peers=3)
    desk.join("a", "b", "c")
    desk.ready("a", "b", "c")
    for peer in votes:
        desk.vote(peer, "r")
    desk.order(EvictPeer("b", "", 0.0))
    for peer in "ac":
        if peer not in votes:
            desk.vote(peer, "r")
    assert desk.state.version == 0
    assert desk.plan().op.attempt == 1
    for peer in "ac":
        desk.vote(peer, "r2")
    assert desk.state.version == 1
    assert [each.peer for each in last_verdict(desk).contributions] == ["a", "c"]


def test_an_eviction_in_a_failed_attempt_fails_it_no_second_time() -> None:
    desk = two()
    desk.ready("a", "b")
    desk.vote("a", "")
    effects = effects_of(desk, EvictPeer("b", "", 0.0))
    assert not emitted(effects, events.AttemptFailed)
    assert sent(effects, Reduce) == ["a"]


def test_the_name_is_free_when_the_time_is_over() -> None:
    desk = two()
    desk.order(EvictPeer("b", "", 5.0))
    desk.wait(4, "a")
    assert coordinator.refusal(desk.state, "b", "2", desk.now_s)
    desk.wait(1, "a")
    assert not coordinator.refusal(desk.state, "b", "2", desk.now_s)


def test_an_eviction_outlasts_a_restart_and_counts_anew() -> None:
    desk = two()
    desk.order(EvictPeer("b", "", 5.0))
    desk.wait(4, "a")
    again = Desk(tuple(desk.journal), start_peers=2)
    again.wait(4)
    assert coordinator.refusal(again.state, "b", "2", again.now_s)
    again.wait(1)
    assert not coordinator.refusal(again.state, "b", "2", again.now_s)


def test_without_a_time_the_eviction_lasts() -> None:
    desk = two()
    desk.order(EvictPeer("b", "", 0.0))
    assert desk.state.evictions["b"].until_s == math.inf
    assert "until the run ends" in coordinator.refusal(desk.state, "b", "2", desk.now_s + 1e6)


def test_the_evicted_has_no_voice() -> None:
    desk = two()
    desk.order(EvictPeer("b", "", 0.0))
    before = desk.state
    effects = desk.said("b", Ready(1, 0, "d0", 10, 1, 1.0, True))
    assert effects == (CloseConnection("b", "1"),)
    assert desk.state.peers == before.peers


def test_only_names_that_were_here_can_be_evicted() -> None:
    desk = two()
    assert desk.order(EvictPeer("x", "", 0.0)) == Done(False, "this run has no peer 'x'; its peers are: a, b")
    assert not [each for each in desk.journal if isinstance(each, EvictionDecided)]
    desk.said("b", Leave("goodbye", done=False))
    assert desk.order(EvictPeer("b", "", 0.0)).reason.startswith("b was gone already; it stays outside")
    assert desk.order(EvictPeer("b", "", 9.0)).ok, "said again with a time, that holds"


def test_who_is_evicted_before_the_start_is_waited_for_no_longer() -> None:
    desk = Desk(start_peers=2)
    desk.join("a")
    desk.order(EvictPeer("a", "", 0.0))
    desk.join("b")
    assert not desk.state.started
    desk.join("c")
    assert desk.state.started


# ---- nonsense --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        StopRun("two\nlines"),
        StopRun("\x1b[31mred"),
        LeavePeer("b", "x" * 501),
        EvictPeer("b", "", math.nan),
        EvictPeer("b", "", math.inf),
        EvictPeer("b", "", -1.0),
    ],
    ids=repr,
)
def test_what_cannot_be_meant_so_changes_nothing(request_: StopRun | LeavePeer | EvictPeer) -> None:
    desk = two()
    before, journal = desk.state, list(desk.journal)
    assert not desk.order(request_).ok
    assert (desk.state.peers, desk.state.stopping, desk.state.evictions) == (before.peers, "", {})
    assert desk.journal == journal
