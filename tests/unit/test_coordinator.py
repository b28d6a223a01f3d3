"""The coordinator machine where no scenario looks: waits that end, journals of others, old processes,
ties.
"""

from __future__ import annotations

import msgspec
import pytest

from atoll import events
from atoll.membership import coordinator, differences, messages
from atoll.membership.messages import (
    Abort,
    Applied,
    CatchUp,
    Declare,
    Ended,
    Heartbeat,
    HeartbeatAck,
    Leave,
    Ready,
    Reduce,
    Verdict,
    View,
    Vote,
)
from atoll.membership.rounds import quorum
from atoll.membership.steps import (
    CloseConnection,
    Emit,
    Journal,
    MembersChanged,
    PeerArrived,
    PeerDropped,
    Send,
    TermRaised,
)
from atoll.values import ParameterInfo, Range, RankInfo, TransferStats
from support.desk import LAYOUT, SETTINGS, Desk, finish_of, sent


def test_a_step_changes_no_value_it_was_given() -> None:
    desk = Desk(start_peers=1)
    before = desk.state
    told = msgspec.json.encode(before)
    desk.join("a")
    desk.ready("a")
    assert msgspec.json.encode(before) == told


def test_heartbeats_are_acknowledged() -> None:
    desk = Desk()
    desk.join("a")
    assert desk.said("a", Heartbeat(3, "local")) == (Send("a", HeartbeatAck(term=1)),)


def test_the_first_record_is_the_term() -> None:
    desk = Desk()
    assert desk.journal == [TermRaised(term=1, session_key=b"k")]
    again = Desk(tuple(desk.journal))
    assert again.journal[-1] == TermRaised(term=2, session_key=b"k")


def test_a_journal_of_other_settings_is_refused() -> None:
    desk = Desk()
    desk.join("a")
    step = coordinator.start(desk.settings, desk.journal, b"k", {**SETTINGS, "run.seed": 2}, 0.0)
    assert finish_of(step.effects) == 2
    assert "run.seed = 2, the run has 1" in step.reason
    assert not any(isinstance(each, Journal) for each in step.effects)


def test_wait_policy_loses_whom_it_waited_for_too_long() -> None:
    desk = Desk(start_peers=2, ready_wait_s=20.0)
    desk.join("a", "b")
    desk.ready("a")
    effects = desk.wait(20, "a", "b")
    assert sent(effects, Reduce) == ["a"]
    assert "b: it was not ready for round 1 within ready_wait_s = 20 s" in desk.last.reason


def test_deadline_policy_without_quorum_ends_its_wait_too() -> None:
    desk = Desk(start_peers=3, min_peers=2, policy="deadline", ready_wait_s=20.0, freeze_s=5.0, grace_s=1.0)
    desk.join("a", "b", "c")
    desk.ready("a")
    desk.wait(25, "a", "b", "c")
    assert [record.peer for record in desk.state.members()] == ["a"]


@pytest.mark.parametrize(
    ("members", "min_peers", "needed"), [(1, 1, 1), (2, 1, 1), (3, 1, 2), (5, 1, 3), (4, 4, 4)]
)
def test_quorum_is_half(members: int, min_peers: int, needed: int) -> None:
    assert quorum(members, min_peers) == needed


def test_votes_are_waited_for_vote_s_after_the_first_yes() -> None:
    desk = Desk(start_peers=2, vote_s=4.0, attempt_s=600.0)
    desk.join("a", "b")
    desk.ready("a", "b")
    desk.vote("a", "r1")
    effects = desk.wait(4, "a", "b")
    assert sent(effects, Abort) == ["b"]
    effects = desk.wait(4, "a", "b")
    assert sent(effects, Reduce) == ["a"], "b answered nothing: it is lost, and a goes on alone"


def test_an_attempt_ends_even_if_nobody_votes() -> None:
    desk = Desk(start_peers=2, vote_s=3.0, attempt_s=5.0)
    desk.join("a", "b")
    desk.ready("a", "b")
    assert sorted(sent(desk.wait(8, "a", "b"), Abort)) == ["a", "b"]


def test_the_run_does_not_wait_for_ever_to_start() -> None:
    desk = Desk(start_peers=3, quorum_wait_s=10.0)
    assert finish_of(desk.wait(30)) is None, "without any peer a coordinator may wait"
    desk.join("a", "b")
    effects = desk.wait(11, "a", "b")
    assert sent(effects, Ended) == ["a", "b"]
    assert finish_of(effects) == 6


def test_all_gone_and_nobody_done() -> None:
    desk = Desk(start_peers=2)
    desk.join("a", "b")
    desk.said("a", Leave("SIGTERM", done=False))
    assert finish_of(desk.said("b", Leave("SIGTERM", done=False))) == 6


def committed(desk: Desk, *peers: str, digest: str) -> Desk:
    """One round of all peers, whose new state has this digest."""
    desk.ready(*peers, digest=desk.state.digest)
    for peer in peers:
        desk.vote(peer, "r")
    for peer in peers:
        desk.said(peer, Applied(desk.state.version, digest))
    return desk


def test_a_run_whose_last_peer_is_lost_is_not_done_because_another_once_was() -> None:
    desk = Desk(start_peers=2, quorum_wait_s=10.0)
    desk.join("a", "b")
    desk.said("a", Leave("its data is at an end", done=True))
    desk.hear(PeerDropped("b", "1"))
    effects = desk.wait(2)
    assert desk.state.members() == ()
    assert finish_of(effects) is None
    assert desk.journal[-1] == MembersChanged(members=(), started=True, done=False)
    again = coordinator.start(desk.settings, desk.journal, b"", None, 0.0)
    assert finish_of(again.effects) is None
    assert finish_of(desk.wait(11)) == 6


def test_the_last_to_leave_says_whether_the_run_is_done() -> None:
    desk = Desk(start_peers=2)
    desk.join("a", "b")
    desk.said("a", Leave("its data is at an end", done=True))
    assert finish_of(desk.said("b", Leave("SIGTERM", done=False))) == 6
    desk = Desk(start_peers=2)
    desk.join("a", "b")
    desk.said("a", Leave("SIGTERM", done=False))
    assert finish_of(desk.said("b", Leave("all steps are committed", done=True))) == 0


def test_a_slow_finisher_is_given_its_time() -> None:
    desk = Desk(start_peers=2, min_peers=2, quorum_wait_s=5.0)
    desk.join("a", "b")
    desk.said("a", Leave("all steps are committed", done=True))
    assert finish_of(desk.wait(30, "b")) is None
    assert finish_of(desk.said("b", Leave("all steps are committed", done=True))) == 0


def test_who_waits_for_a_round_after_another_was_done_waits_quorum_wait_s() -> None:
    desk = Desk(start_peers=2, min_peers=2, quorum_wait_s=5.0)
    desk.join("a", "b")
    desk.said("a", Leave("its data is at an end", done=True))
    desk.ready("b")
    effects = desk.wait(6, "b")
    assert sent(effects, Ended) == ["b"]
    assert finish_of(effects) == 6


def test_a_run_that_diverged_ends_after_three_rounds() -> None:
    desk = Desk(start_peers=2)
    desk.join("a", "b")
    for _ in range(2):
        desk.ready("a", finite=False)
        effects = desk.ready("b", finite=False)
        left_out = [each.event for each in effects if isinstance(each, Emit)]
        assert [event.peer for event in left_out if isinstance(event, events.PeerLeftOut)] == ["a", "b"]
        assert finish_of(effects) is None
    again = Desk(tuple(desk.journal), start_peers=2)
    for peer in "ab":
        again.hear(PeerArrived(peer, "1", "host"))
        again.said(peer, Declare(LAYOUT, SETTINGS, (), 0, 2, "d0", 20))
    again.ready("a", finite=False)
    effects = again.ready("b", finite=False)
    ended = [each.message for each in effects if isinstance(each, Send) and isinstance(each.message, Ended)]
    assert sent(effects, Verdict) == sent(effects, Ended) == ["a", "b"]
    assert {message.kind for message in ended} == {"diverged"}
    assert "3 rounds in a row" in ended[0].reason
    assert finish_of(effects) == 7


def test_one_finite_round_between_is_no_divergence() -> None:
    desk = Desk(start_peers=1)
    desk.join("a")
    for finite in (False, False, True, False, False):
        effects = desk.ready("a", digest=desk.state.digest, finite=finite)
        if finite:
            desk.vote("a", "r")
            desk.said("a", Applied(1, "d1"))
        assert finish_of(effects) is None
    assert desk.state.round.number == 6


def test_done_is_remembered_over_a_restart() -> None:
    desk = Desk(start_peers=2)
    desk.join("a", "b")
    desk.said("a", Leave("all steps are committed", done=True))
    records = list(desk.journal)
    desk.said("b", Leave("all steps are committed", done=True))
    assert desk.journal[len(records) :] == [MembersChanged(members=(), started=True, done=True)]
    again = coordinator.start(desk.settings, desk.journal, b"", None, 0.0)
    assert finish_of(again.effects) == 0
    assert "is over already, at version 0" in again.reason


def test_a_restarted_coordinator_waits_for_the_members_and_not_for_ever() -> None:
    desk = Desk(start_peers=2, connect_s=8.0)
    desk.join("a", "b")
    again = Desk(tuple(desk.journal), start_peers=2, connect_s=8.0)
    again.join("a")
    again.ready("a")
    assert again.state.round.attempt is None
    assert sent(again.wait(8, "a"), Reduce) == ["a"]


def test_old_processes_are_remembered_within_bounds() -> None:
    desk = Desk(start_peers=1)
    for number in range(300):
        desk.join("a", incarnation=f"i{number}")
    assert len(desk.state.gone) <= 128
    assert len(desk.state.peers) == 1
    assert "a newer process takes part as 'a'" in coordinator.refusal(desk.state, "a", "i298", desk.now_s)
    assert not coordinator.refusal(desk.state, "a", "i299", desk.now_s)


def test_an_old_process_changes_nothing() -> None:
    desk = Desk(start_peers=2)
    desk.join("a", "b")
    desk.join("b", incarnation="2")
    before = desk.state
    for message in (Heartbeat(9, "x"), Leave("bye", done=True), Ready(1, 0, "d0", 1, 1, 1.0, True)):
        assert desk.said("b", message, incarnation="1") == ()
        assert desk.state == before
    assert desk.hear(PeerDropped("b", "1")) == ()
    assert desk.state == before


def test_a_lost_peer_that_speaks_has_to_connect_again() -> None:
    desk = Desk(start_peers=2)
    desk.join("a", "b")
    desk.wait(6, "a")
    assert "b" not in desk.state.peers
    assert desk.said("b", Heartbeat(1, "local")) == (CloseConnection("b", "1"),)
    assert desk.said("b", Leave("bye", done=False)) == ()


def test_a_tie_of_digests_goes_to_the_oldest() -> None:
    desk = Desk(start_peers=2)
    desk.join("b", "a")
    desk.ready("a", "b")
    desk.vote("a", "r1")
    desk.vote("b", "r1")
    effects = (*desk.ready("b", digest="x"), *desk.ready("a", digest="y"))
    assert sent(effects, CatchUp) == ["a"]
    assert sent(effects, Reduce) == ["b"]


def test_a_ready_for_another_round_or_version_is_ignored() -> None:
    desk = Desk(start_peers=1)
    desk.join("a")
    for number, version in ((0, 0), (2, 0), (1, 1), (1, -1)):
        desk.said("a", Ready(number, version, "d0", 10, 1, 1.0, True))
        assert desk.state.peers["a"].ready is None
        assert "ignored a ready of a" in desk.last.reason


def test_a_vote_of_another_attempt_is_ignored() -> None:
    desk = Desk(start_peers=2)
    desk.join("a", "b")
    desk.ready("a", "b")
    attempt = desk.state.round.attempt
    assert attempt is not None
    for changes in ({"attempt": 1}, {"term": 0}, {"round": 2}):
        op = msgspec.structs.replace(attempt.plan.op, **changes)
        desk.said("a", Vote(op, True, "r1", (), "", TransferStats()))
        assert "ignored a vote of a" in desk.last.reason
    assert desk.state.round.attempt == attempt


def test_before_it_declares_a_peer_says_nothing() -> None:
    desk = Desk(start_peers=1)
    desk.hear(PeerArrived("a", "1", "host"))
    desk.said("a", Ready(1, 0, "d0", 10, 1, 1.0, True))
    assert "before it is a member" in desk.last.reason


def test_a_view_goes_to_every_member() -> None:
    desk = Desk(start_peers=2)
    desk.join("a")
    assert sorted(sent(desk.join("b"), View)) == ["a", "a", "b", "b"], "joined, then started"


def test_the_first_differing_setting_is_named_with_both_values() -> None:
    run = {"a": 1, "b": True, "c": "x"}
    assert differences.settings_difference(run, dict(run), "p") is None
    assert (
        differences.settings_difference(run, {**run, "b": False, "c": "y"}, "p")
        == "p has b = False, the run has True"
    )
    assert (
        differences.settings_difference(run, {"a": 1, "b": True}, "p")
        == "p has no setting c, the run has c = 'x'"
    )
    assert (
        differences.settings_difference(run, {**run, "d": 4}, "p")
        == "p has d = 4, the run has no such setting"
    )


def test_layouts_match_by_name_in_any_order() -> None:
    w, b = ParameterInfo("w", (2, 3), "float32"), ParameterInfo("b", (), "float32")
    run = {"w": w, "b": b}
    assert differences.layout_difference(run, {"b": b, "w": w}, "p") is None
    flat = {"w": ParameterInfo("w", (6,), "float32"), "b": b}
    assert (
        differences.layout_difference(run, flat, "p")
        == "p has parameter w as float32[6], the run as float32[2, 3]"
    )


def test_an_empty_journal_and_peers_with_a_past() -> None:
    desk = Desk()
    desk.hear(PeerArrived("a", "1", "host"))
    effects = desk.said("a", Declare(LAYOUT, SETTINGS, (), 7, 9, "d7", 700, term=3, version_term=3))
    assert (desk.state.version, desk.state.round.number, desk.state.term) == (7, 10, 4)
    assert "which this coordinator's journal (version 0, round 0) does not know" in desk.last.reason
    assert any(isinstance(each, Emit) and isinstance(each.event, events.VersionLearned) for each in effects)


def test_a_new_process_takes_the_name_of_one_that_lives_and_has_to_catch_up() -> None:
    desk = Desk(start_peers=2)
    desk.join("a", "b")
    committed(desk, "a", "b", digest="d1")
    effects = desk.hear(PeerArrived("b", "2", "elsewhere"))
    assert CloseConnection("b", "1") in effects
    assert not desk.state.peers["b"].member
    assert "a newer process takes part as 'b'" in coordinator.refusal(desk.state, "b", "1", desk.now_s)
    before = desk.state.peers
    desk.hear(PeerArrived("b", "1", "host"))
    assert desk.state.peers == before, "the old process has no voice any more"
    effects = desk.said("b", Declare(LAYOUT, SETTINGS, (), 0, 0, "d0", 0), "2")
    assert sent(effects, CatchUp) == ["b"]


def test_a_killed_peer_may_start_again_as_soon_as_its_connection_is_gone() -> None:
    desk = Desk(start_peers=2)
    desk.join("a", "b")
    committed(desk, "a", "b", digest="d1")
    desk.hear(PeerDropped("b", "1"))
    desk.hear(PeerArrived("b", "2", "host"))
    assert desk.state.peers["b"].incarnation == "2"


def test_a_lost_process_does_not_take_its_name_back_from_a_newer_one() -> None:
    desk = Desk(start_peers=2)
    desk.join("a", "b")
    desk.wait(6, "a")  # b froze and was lost
    desk.join("b", incarnation="2")
    members = desk.state.peers
    assert CloseConnection("b", "1") in desk.hear(PeerArrived("b", "1", "host"))
    assert desk.state.peers == members


@pytest.mark.parametrize(
    ("ranges", "fault"),
    [
        ([(0, 4)], None),
        ([(0, 2)], "of peer 'a' nobody owns elements 2 to 4"),
        ([(0, 3), (2, 4)], "of peer 'a' two ranks own elements 2 to 3"),
        ([(0, 2), (3, 4)], "of peer 'a' nobody owns elements 2 to 3"),
        ([(0, 5)], "peer 'a' rank 0 owns elements 0 to 5; the model has 0 to 4"),
        ([(2, 4), (0, 2)], None),
        ([], "of peer 'a' nobody owns elements 0 to 4"),
    ],
)
def test_ranks_own_each_element_once(ranges: list[tuple[int, int]], fault: str | None) -> None:
    ranks = tuple(RankInfo("host", 1, (Range(*each),)) for each in ranges)
    assert differences.ownership_fault(ranks, 4, "peer 'a'") == fault


def test_a_peer_whose_ranks_leave_elements_out_is_refused() -> None:
    desk = Desk(start_peers=1)
    desk.hear(PeerArrived("a", "1", "host"))
    ranks = (RankInfo("host", 1, (Range(0, 3),)),)
    effects = desk.said("a", Declare(LAYOUT, SETTINGS, ranks, 0, 0, "d0", 0))
    (said,) = [each.message for each in effects if isinstance(each, Send)]
    assert isinstance(said, messages.Refused)
    assert (said.kind, "nobody owns elements 3 to 4" in said.reason) == ("layout", True)
