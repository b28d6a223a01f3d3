"""What the coordinator asks the planner, what it makes of the answer, and how rates come back to it with votes."""

from __future__ import annotations

import msgspec
import pytest

from atoll import events
from atoll.membership.messages import Reduce
from atoll.plan.grid import Grid
from atoll.plan.planner import choose
from atoll.plan.shapes import avoids
from atoll.values import Contribution, Edge, LinkRate, ParameterInfo, PlanChoice, PlanRequest, RankInfo
from support.desk import LAYOUT, Desk, emitted, sent

MB = 1e6
LARGE = (ParameterInfo("w", (100_000, 1000), "float32"),)


Reports = dict[str, tuple[LinkRate, ...]]


def thin(members: str, region: str) -> Reports:
    """What members report whose links to those outside of their `region` are thin."""
    reports: Reports = {}
    for one in members:
        pairs = [
            (other, 50 * MB if (one in region) == (other in region) else MB)
            for other in members
            if other != one
        ]
        lines = (LinkRate(one, "", 100 * MB), LinkRate("", one, 100 * MB))
        reports[one] = (*lines, *(LinkRate(one, other, rate, 0.08) for other, rate in pairs))
    return reports


def commit(desk: Desk, members: str, links: Reports | None = None) -> list[events.RatesMeasured]:
    """One committed round; the rates that were shown with it."""
    desk.ready(*members, digest=desk.state.digest or "d0")
    for peer in members:
        effects = desk.vote(peer, "r", links=(links or {}).get(peer, ()))
    return emitted(effects, events.RatesMeasured)


def test_rates_of_one_round_shape_the_next() -> None:
    desk = Desk(start_peers=4)
    desk.layout = LARGE
    desk.join(*"abcd")
    shown = commit(desk, "abcd", thin("abcd", "ab"))
    assert len(shown) == 1
    assert LinkRate("a", "c", MB, 0.08) in shown[0].links
    desk.ready(*"abc", digest="d0")
    effects = desk.ready("d", digest="d0")
    (started,) = emitted(effects, events.AttemptStarted)
    assert started.topology == "two-level"
    assert started.predicted_s > 0
    assert "two-level: about" in started.reason
    assert desk.plan().lanes[0].up


def test_equal_rates_are_not_shown_again() -> None:
    desk = Desk(start_peers=2)
    desk.join("a", "b")
    links = {"a": (LinkRate("a", "b", 5 * MB), LinkRate("a", "", 5 * MB))}
    assert len(commit(desk, "ab", links)) == 1
    assert commit(desk, "ab", links) == []


def test_votes_against_teach_no_rates() -> None:
    desk = Desk(start_peers=2)
    desk.join("a", "b")
    desk.ready("a", "b")
    desk.vote("a", "", links=(LinkRate("a", "b", 1.0),))
    assert desk.state.rates == {}


def test_a_restarted_coordinator_learns_rates_anew() -> None:
    desk = Desk(start_peers=2)
    desk.join("a", "b")
    commit(desk, "ab", {"a": (LinkRate("a", "b", 5 * MB),)})
    assert desk.state.rates
    assert Desk(tuple(desk.journal), start_peers=2).state.rates == {}


def test_a_forced_topology_is_obeyed() -> None:
    desk = Desk(start_peers=3, topology="ring", connections=5)
    desk.join(*"abc")
    desk.ready(*"abc")
    assert all(lane.up for lane in desk.plan().lanes)
    assert desk.plan().connections == 5


def test_caps_come_with_the_declaration() -> None:
    desk = Desk(start_peers=3)
    desk.layout = LARGE
    desk.join("a", "b", ranks=(RankInfo("host", 1, ()),))
    desk.join("c", ranks=(RankInfo("host", 1, (), max_up=1000, max_down=1000),))
    desk.ready(*"abc")
    assert {lane.root for lane in desk.plan().lanes} == {"a", "b"}


def test_updates_are_named_by_their_digest() -> None:
    desk = Desk(start_peers=2)
    desk.join("a", "b")
    desk.ready("a", "b")
    assert desk.plan().contributions == tuple(Contribution(p, 1, f"update of {p}") for p in "ab")


def test_a_broken_link_moves_lanes_and_a_lost_peer_leaves_the_others_in_place() -> None:
    desk = Desk(start_peers=4)
    desk.join(*"abcd")
    desk.ready(*"abcd")
    first = desk.plan()
    desk.vote("a", "", broken=(Edge("d", "a"),))
    for peer in "bcd":
        desk.vote(peer, "")
    second = desk.plan()
    assert (second.op.attempt, second.chunk_bytes) == (1, first.chunk_bytes)
    assert avoids(second.lanes, second.members, {Edge("d", "a")})
    assert [lane.root for lane in second.lanes if lane.share == second.lanes[1].share] >= ["b", "c"]
    position = 0
    total = sum(lane.share for lane in second.lanes)
    kept = {}
    for lane in second.lanes:
        kept.setdefault(lane.root, []).append((position / total, (position + lane.share) / total))
        position += lane.share
    assert (0.25, 0.5) in kept["b"]
    assert (0.5, 0.75) in kept["c"]


def test_a_layout_that_nobody_could_hold_is_planned_all_the_same() -> None:
    desk = Desk(start_peers=2)
    desk.layout = (ParameterInfo("w", (1 << 62, 1 << 62), "float32"),)
    desk.join("a", "b", ranks=(RankInfo("host", 1, (), max_up=(1 << 64) - 1, max_down=-5),))
    desk.ready("a", "b")
    assert len(desk.plan().lanes) == 2


def test_the_planner_is_told_what_the_coordinator_knows() -> None:
    asked: list[PlanRequest] = []

    def make_lanes(request: PlanRequest) -> PlanChoice:
        asked.append(request)
        return choose(request)

    desk = Desk(start_peers=2, make_lanes=make_lanes)
    desk.join("b", "a")
    desk.ready("a", "b")
    sizes = [each.shape[0] for each in LAYOUT]
    assert asked == [
        PlanRequest(
            members=("b", "a"),
            contributors=("a", "b"),
            wire_bytes=Grid.of(sizes).wire_bytes("int8"),
            codec="int8",
            max_up={"a": 0, "b": 0},
            max_down={"a": 0, "b": 0},
        )
    ]


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -5.0, 1e300])
def test_no_rate_that_a_peer_reports_does_harm(rate: float) -> None:
    desk = Desk(start_peers=2)
    desk.join("a", "b")
    links = {"a": (LinkRate("a", "b", rate, rate), LinkRate("x", "a", rate), LinkRate("a", "", rate))}
    commit(desk, "ab", links)
    desk.ready("a", digest="d0")
    assert sent(desk.ready("b", digest="d0"), Reduce) == ["a", "b"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(desk.plan()), type=type(desk.plan())) == desk.plan()
