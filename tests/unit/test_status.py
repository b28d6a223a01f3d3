"""What an operator is told about a run: from the state alone, in sentences, bounded."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from rich.console import Console

from atoll.cli.status import json_line
from atoll.dashboard.status import render
from atoll.membership import status
from atoll.membership.messages import Applied, Heartbeat, Leave
from atoll.membership.operator import (
    EvictedStatus,
    EvictPeer,
    LeavePeer,
    PeerStatus,
    Remark,
    SlotsStatus,
    Status,
    StopRun,
)
from atoll.membership.recollection import KEPT, KEPT_COMMITS
from atoll.membership.steps import PeerArrived, PeerDropped, Tick
from atoll.values import LinkRate
from support.desk import Desk


def told(desk: Desk, after_s: float = 0.0) -> Status:
    return status.report(desk.state, desk.now_s + after_s)


def states(desk: Desk, after_s: float = 0.0) -> dict[str, tuple[str, str]]:
    return {peer.peer: (peer.state, peer.says) for peer in told(desk, after_s).peers}


def shown(found: Status, width: int = 160) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(render(found), soft_wrap=True)
        return console.export_text()


def three() -> Desk:
    desk = Desk(start_peers=3)
    desk.join("a", "b", "c")
    return desk


def commit(desk: Desk, *peers: str, digest: str) -> None:
    desk.ready(*peers, digest=desk.state.digest)
    for peer in peers:
        desk.vote(peer, "r")
    for peer in peers:
        desk.said(peer, Applied(desk.state.version, digest))


# ---- what each peer does ---------------------------------------------------------------------------------


def test_before_the_start_it_says_who_is_missing() -> None:
    desk = Desk(start_peers=3)
    desk.join("a")
    desk.hear(PeerArrived("b", "1", "host"))
    assert states(desk) == {
        "a": ("waiting", "for the run to start"),
        "b": ("connected", "has not declared yet"),
    }
    found = told(desk)
    assert found.waiting == "waiting for peers: 1 of 3 declared (a)"
    assert found.why == ("b is connected and has not declared yet: it builds its model, or reads its data",)


def test_each_peer_is_told_by_what_it_does() -> None:
    desk = three()
    desk.said("a", Heartbeat(140, "local", 40, 100))
    assert states(desk)["a"] == ("training", "step 40 of 100")
    assert states(desk)["b"] == ("training", "at step 0")
    desk.ready("a")
    assert states(desk)["a"] == ("ready", "100 tokens in 10 steps")
    desk.ready("b", "c")
    assert {word for word, _ in states(desk).values()} == {"reducing"}
    desk.vote("a", "r")
    desk.vote("b", "")
    assert states(desk)["a"] == ("voted", "yes")
    assert states(desk)["b"] == ("voted", "no: no")


def test_who_has_the_verdict_and_was_last_heard_before_it_takes_the_outer_step() -> None:
    desk = three()
    desk.ready("a", "b", "c")
    desk.said("a", Heartbeat(100, "voted", 100, 100))
    for peer in "abc":
        desk.vote(peer, "r")
    assert states(desk)["a"] == ("applying", "takes the outer step")


def test_a_phase_that_the_peer_names_itself_is_passed_on() -> None:
    desk = three()
    desk.said("c", Heartbeat(0, "catching up"))
    assert states(desk)["c"][0] == "catching up"


def test_who_catches_up_is_told_with_its_version() -> None:
    desk = three()
    commit(desk, "a", "b", "c", digest="d1")
    desk.join("d")
    assert states(desk)["d"] == ("catching up", "from version 0 to 1, for 0 s")


def test_who_is_on_probation_is_told() -> None:
    desk = three()
    desk.state = msgspec.structs.replace(desk.state, offences={"b": (1, 1, 1), "gone": (1, 1, 1)})
    (why,) = told(desk).why
    assert why.startswith("b: it is on probation until round ")


def test_a_silent_peer_is_told_with_its_deadline() -> None:
    desk = three()
    desk.wait(3, "a", "b")
    assert states(desk)["c"] == ("silent", "silent for 3.0 s")
    assert told(desk).why == ("c is silent for 3.0 s; it is lost at dead_s = 5 s",)


def test_a_peer_whose_connection_closed_is_told_with_its_deadline() -> None:
    desk = three()
    desk.hear(PeerDropped("c", "1"))
    assert told(desk, after_s=0.25).why == (
        "c is away (connection closed 0.2 s ago); it is lost in 0.8 s unless it is back",
    )


def test_a_restarted_coordinator_tells_whom_it_expects() -> None:
    desk = three()
    again = Desk(tuple(desk.journal), start_peers=3)
    assert set(states(again).values()) == {("expected", "not back since the coordinator started")}


def test_who_is_asked_to_leave_and_who_is_evicted_is_told() -> None:
    desk = three()
    desk.order(LeavePeer("b", "needed"))
    desk.order(EvictPeer("c", "broken", 60.0))
    assert states(desk)["b"] == ("training", "at step 0, asked to leave")
    (evicted,) = told(desk).evicted
    assert (evicted.peer, evicted.reason, evicted.left_s) == ("c", "broken", 60.0)
    desk.wait(61, "a", "b")
    assert told(desk).evicted == ()


# ---- why it waits ----------------------------------------------------------------------------------------


def test_the_reason_of_the_machine_is_what_is_waited_for() -> None:
    desk = three()
    desk.ready("a")
    assert told(desk).waiting == "round 1: 1 of 3 ready, waiting for b, c"
    desk.ready("b", "c")
    assert told(desk).waiting == "attempt t1/r1/f0/a0: waiting for the votes of a, b, c"
    desk.vote("b", "r")
    assert told(desk).waiting == "attempt t1/r1/f0/a0: waiting for the votes of a, c"


def test_a_slow_peer_is_told_with_what_is_left_of_the_wait() -> None:
    desk = Desk(start_peers=2, ready_wait_s=30.0)
    desk.join("a", "b")
    desk.ready("a")
    for _ in range(10):
        desk.said("b", Heartbeat(3, "local", 3, 100))
        desk.wait(1, "a")
    assert told(desk).why == (
        "b is not ready yet (step 3 of 100); its step last moved 10 s ago, the others wait at most another 20 s",
    )


def test_under_the_deadline_policy_the_grace_and_then_the_freeze_is_what_is_left() -> None:
    desk = Desk(start_peers=2, policy="deadline", grace_s=4.0, freeze_s=9.0)
    desk.join("a", "b")
    desk.ready("a")
    assert told(desk).why[-1].endswith("the others wait at most another 4 s")
    desk.wait(4, "a", "b")
    assert told(desk).why[-1].endswith("the others wait another 9 s: the round is closed")


def test_a_run_that_is_to_stop_says_so() -> None:
    desk = three()
    desk.order(StopRun("enough"))
    assert told(desk).stopping == "the run was stopped by an operator: enough"
    assert "the run was stopped by an operator: enough: this round is the last" in shown(told(desk))


# ---- what is remembered ----------------------------------------------------------------------------------


def test_failures_are_told_newest_first_and_within_bounds() -> None:
    desk = three()
    for number in range(3 * KEPT):
        desk.join("x", incarnation=f"i{number}")
        desk.said("x", Leave("goodbye", done=False), f"i{number}")
        desk.order(EvictPeer("x", f"reason {number}", 0.0))
        desk.order(EvictPeer("x", f"reason {number}", 0.1))
        desk.wait(1, "a", "b", "c")
    recalled = desk.state.recollection
    assert len(recalled.failures) == len(recalled.reasons) == KEPT
    assert told(desk).failures[0].text == f"evicted x: reason {3 * KEPT - 1}"
    assert told(desk).failures[0].ago_s == 1.0


def test_rounds_and_tokens_are_told_over_the_newest_commits() -> None:
    desk = three()
    assert (told(desk).round_s, told(desk).tokens_per_s) == (None, None)
    for version in range(1, KEPT_COMMITS + 4):
        desk.wait(2, "a", "b", "c")
        commit(desk, "a", "b", "c", digest=f"d{version}")
    found = told(desk)
    assert len(desk.state.recollection.commits) == KEPT_COMMITS
    assert (found.round_s, found.tokens_per_s) == (2.0, 150.0)
    assert {peer.tokens for peer in found.peers} == {100}


def test_links_are_told_slowest_first_and_within_bounds() -> None:
    desk = Desk(start_peers=2)
    desk.join("a", "b")
    desk.ready("a", "b")
    desk.vote("a", "r", links=(LinkRate("a", "b", 1e6, 0.05), LinkRate("b", "a", 5e5, 0.05)))
    desk.vote("b", "r")
    assert [(link.source, link.bytes_per_s) for link in told(desk).links] == [("b", 5e5), ("a", 1e6)]
    text = shown(told(desk))
    assert "1.0 MB/s 50 ms" in text
    assert "500 kB/s 50 ms" in text
    rates = {(f"p{i}", f"p{j}"): desk.state.rates["a", "b"] for i in range(60) for j in range(60)}
    desk.state = msgspec.structs.replace(desk.state, rates=rates)
    assert len(told(desk).links) == status.MAX_LINKS


# ---- it costs nothing ------------------------------------------------------------------------------------


def test_data_slots_are_told_by_epoch_and_holder() -> None:
    desk = Desk(start_peers=2)
    desk.slots, desk.wish = 9, 3
    desk.join("a", "b")
    found = told(desk)
    assert found.slots == SlotsStatus(count=9, epoch=0, leased=6, unread=3)
    assert [peer.slots for peer in found.peers] == [3, 3]
    assert "data: epoch 0, 6 of 9 slots leased, 3 unread" in shown(found)
    assert told(three()).slots is None


def test_to_tell_it_changes_nothing() -> None:
    desk = three()
    before = msgspec.json.encode(desk.state)
    told(desk, after_s=0.5)
    assert msgspec.json.encode(desk.state) == before


def test_what_is_remembered_is_not_journaled_and_decides_nothing() -> None:
    desk = three()
    desk.ready("a")
    told_to_nobody = msgspec.structs.replace(desk.state, recollection=type(desk.state.recollection)())
    kept = desk.hear(Tick())
    desk.state = told_to_nobody
    assert desk.hear(Tick()) == kept == ()


# ---- as text and as JSON ---------------------------------------------------------------------------------


def test_json_is_one_line_with_the_struct_s_fields() -> None:
    desk = three()
    desk.order(EvictPeer("c", "broken", 0.0))
    line = json_line(told(desk))
    assert line.endswith("}\n")
    assert line.count("\n") == 1
    found = json.loads(line)
    assert tuple(found) == Status.__struct_fields__
    assert [peer["peer"] for peer in found["peers"]] == ["a", "b"]
    assert found["evicted"] == [{"peer": "c", "reason": "broken", "left_s": None}]


def test_every_field_is_explained() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    for struct in (Status, PeerStatus, EvictedStatus, Remark, LinkRate):
        for name in struct.__struct_fields__:
            assert f"`{name}`" in text, f"{struct.__name__}.{name}"


def test_the_table_names_every_peer_with_its_state() -> None:
    desk = three()
    desk.said("a", Heartbeat(40, "local", 40, 100))
    desk.ready("b")
    lines = shown(told(desk)).splitlines()
    assert any(line.startswith("a ") and "training" in line and "step 40 of 100" in line for line in lines)
    assert any(line.startswith("b ") and "ready" in line for line in lines)
    assert "round 1: 1 of 3 ready, waiting for a, c" in lines


def test_names_are_shown_as_they_are() -> None:
    """A name with rich's markup in it is a name."""
    desk = Desk(start_peers=2)
    desk.join("[red]x[/red]", "b")
    assert "[red]x[/red]" in shown(told(desk))
