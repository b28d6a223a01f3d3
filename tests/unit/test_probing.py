"""Links of new members are measured once, while no round runs; a round's own traffic takes the place of that guess."""

from __future__ import annotations

from typing import Any

import pytest

from atoll import events
from atoll.membership import member
from atoll.membership.member_state import Phase
from atoll.membership.messages import Applied, CaughtUp, Declare, Probe, Probed, View
from atoll.membership.probing import LEAST_BYTES, MOST_PARTNERS, PROBE_BYTES
from atoll.membership.settings import Timeouts
from atoll.membership.steps import CoordinatorSaid, MeasureLinks, Send, TrainerSaid
from atoll.values import LinkRate, ParameterInfo, RankInfo
from support.desk import Desk, emitted

MB = 1e6
LARGE = (ParameterInfo("w", (100_000, 1000), "float32"),)


def open_desk(layout: tuple[ParameterInfo, ...] = LARGE, **settings: Any) -> Desk:
    desk = Desk(**settings)
    desk.layout = layout
    return desk


def join(desk: Desk, *peers: str) -> dict[str, set[str]]:
    return asked(
        [each for peer in peers for each in desk.join(peer, ranks=(RankInfo(f"host-{peer}", 1, ()),))]
    )


def asked(effects: Any) -> dict[str, set[str]]:
    """Who was asked to measure the links to whom."""
    found: dict[str, set[str]] = {}
    for each in effects:
        if isinstance(each, Send) and isinstance(each.message, Probe):
            assert each.peer not in found, "one order at a time"
            assert all(rank.host == f"host-{peer}" for peer, rank in each.message.targets.items())
            found[each.peer] = set(each.message.targets)
    return found


def catch_up(desk: Desk, peer: str) -> dict[str, set[str]]:
    """A newcomer to a run under way says that it holds the newest version."""
    state = desk.state
    return asked(desk.said(peer, CaughtUp(state.version, state.round.number - 1, state.digest, 0)))


def commit(desk: Desk, members: str, links: dict[str, tuple[LinkRate, ...]]) -> None:
    desk.ready(*members, digest=desk.state.digest or "d0")
    for peer in members:
        desk.vote(peer, "r", links=links.get(peer, ()))
    for peer in members:
        desk.said(peer, Applied(desk.state.version, "d1"))


def test_as_the_run_starts_every_pair_is_measured_both_ways_and_only_once() -> None:
    desk = open_desk(start_peers=3)
    assert join(desk, "a", "b") == {}
    assert join(desk, "c") == {"a": {"b", "c"}, "b": {"a", "c"}, "c": {"a", "b"}}
    assert asked(desk.wait(3, "a", "b", "c")) == {}


def test_links_that_a_round_has_measured_are_not_asked_for() -> None:
    desk = open_desk(start_peers=2)
    join(desk, "a", "b")
    commit(desk, "ab", {"a": (LinkRate("a", "b", MB, 0.1), LinkRate("b", "a", MB, 0.1))})
    join(desk, "c")
    assert catch_up(desk, "c") == {"a": {"c"}, "b": {"c"}, "c": {"a", "b"}}
    assert "the links of c are measured" in desk.last.reason


def test_nothing_is_measured_while_a_round_runs_or_somebody_waits_for_one() -> None:
    desk = open_desk(start_peers=2)
    join(desk, "a", "b")
    commit(desk, "ab", {})
    desk.ready("a", digest="d1")
    join(desk, "c")
    assert catch_up(desk, "c") == {}
    desk.ready("b", "c", digest="d1")
    assert {"a", "b", "c"} == set(desk.plan().members)
    for peer in "ab":
        assert asked(desk.vote(peer, "r2")) == {}
    known = (LinkRate("c", "a", MB), LinkRate("a", "c", MB))
    assert asked(desk.vote("c", "r2", links=known)) == {"b": {"c"}, "c": {"b"}}, (
        "after it, what it has not shown"
    )


def test_an_update_so_small_that_a_probe_would_cost_as_much_is_not_worth_one() -> None:
    small, least = 8 * LEAST_BYTES * 256 // 260 - 512, 8 * LEAST_BYTES
    desk = open_desk((ParameterInfo("w", (small,), "float32"),), start_peers=2)
    assert join(desk, "a", "b") == {}
    desk = open_desk((ParameterInfo("w", (least,), "float32"),), start_peers=2)
    assert join(desk, "a", "b") == {"a": {"b"}, "b": {"a"}}


def test_a_crowd_asks_each_for_a_few() -> None:
    desk = open_desk(start_peers=40)
    orders = join(desk, *(f"p{number:02}" for number in range(40)))
    assert len(orders) == 40
    assert all(MOST_PARTNERS <= len(targets) <= 2 * MOST_PARTNERS for targets in orders.values())


def test_who_tells_no_address_is_not_measured() -> None:
    desk = open_desk(start_peers=2)
    assert asked(desk.join("a", "b")) == {}


def probe_report(desk: Desk, *links: LinkRate, failed: dict[str, str] | None = None) -> Any:
    return desk.said("a", Probed(links, failed or {}))


def test_what_was_measured_is_shown_and_shapes_the_first_plan() -> None:
    desk = open_desk(start_peers=3)
    join(desk, "a", "b", "c")
    link = LinkRate("a", "b", 5 * MB, 0.2)
    effects = probe_report(desk, link, failed={"c": "too few answers by the deadline"})
    assert emitted(effects, events.RatesMeasured) == [
        events.RatesMeasured(round=1, links=(link,), probed=True)
    ]
    (failed,) = emitted(effects, events.ProbesFailed)
    assert (failed.peer, failed.reasons) == ("a", {"c": "too few answers by the deadline"})
    desk.ready("a", "b")
    (started,) = emitted(desk.ready("c"), events.AttemptStarted)
    assert "5 of 6 links not measured" in started.reason


def test_a_round_knows_better_than_a_probe_and_a_probe_never_better_than_a_round() -> None:
    desk = open_desk(start_peers=2)
    join(desk, "a", "b")
    probe_report(desk, LinkRate("a", "b", 5 * MB, 0.2))
    commit(desk, "ab", {"a": (LinkRate("a", "b", 20 * MB, 0.1),)})
    assert desk.state.rates["a", "b"].bytes_per_s == 20 * MB
    assert emitted(probe_report(desk, LinkRate("a", "b", 5 * MB, 0.2)), events.RatesMeasured) == []
    assert desk.state.rates["a", "b"].bytes_per_s == 20 * MB


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0, 0.0])
def test_nonsense_teaches_nothing(rate: float) -> None:
    desk = open_desk(start_peers=2)
    join(desk, "a", "b")
    probe_report(desk, LinkRate("a", "b", rate), LinkRate("x", "a", MB), LinkRate("b", "c", MB))
    assert desk.state.rates == {}


def test_a_peer_measures_in_local_only_and_says_what_it_found() -> None:
    order = Probe({"b": RankInfo("host", 1, ())}, PROBE_BYTES, 4, 1.0)
    step = member.start("a", Timeouts(), 0.0)
    state = member.step(step.state, member.Connected(1), 0.0).state
    assert member.step(state, CoordinatorSaid(order), 0.0).effects == ()
    state = member.step(state, TrainerSaid(Declare((), {}, (), 0, 0, "d0", 0)), 0.0).state
    view = View(term=1, version=0, round=0, members=("a", "b"), started=True, reason="it starts")
    state = member.step(state, CoordinatorSaid(view), 0.0).state
    assert state.phase is Phase.LOCAL
    assert member.step(state, CoordinatorSaid(order), 0.0).effects == (MeasureLinks(order),)
    said = Probed((LinkRate("a", "b", MB),), {})
    assert member.step(state, TrainerSaid(said), 0.0).effects == (Send("", said),)
