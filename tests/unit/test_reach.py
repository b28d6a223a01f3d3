"""Who can dial whom: asked before a round is planned over a pair, told as it changes; plans go round what is not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from rich.console import Console

from atoll import events
from atoll.dashboard.status import render
from atoll.membership import member, status
from atoll.membership.member_state import Phase
from atoll.membership.messages import CatchUp, Declare, Reach, Reached, Ready, Reduce, View, Vote
from atoll.membership.reach import AGAIN_S, ANSWER_S, MOST_PEERS, TRIAL_S
from atoll.membership.settings import Timeouts
from atoll.membership.steps import CoordinatorSaid, MeasureLinks, Send, TrainerSaid
from atoll.membership.ways import Way, broken_pairs, one_way, rows, unreached
from atoll.values import Edge, LinkRate, Range, RankInfo, Source, TransferStats
from support.desk import Desk, emitted


def join(desk: Desk, *peers: str) -> dict[str, set[str]]:
    return asked(
        [each for peer in peers for each in desk.join(peer, ranks=(RankInfo(f"host-{peer}", 7, ()),))]
    )


def asked(effects: Any) -> dict[str, set[str]]:
    """Who was asked to dial whom."""
    found: dict[str, set[str]] = {}
    for each in effects:
        if isinstance(each, Send) and isinstance(each.message, Reach):
            assert all(rank.host == f"host-{peer}" for peer, rank in each.message.targets.items())
            found.setdefault(each.peer, set()).update(each.message.targets)
    return found


def answers(desk: Desk, outgoing: str = "", others: str = "abcd") -> list[Any]:
    """All members answer; nobody reaches those in `outgoing`."""
    members = [each for each in others if each in desk.state.peers]
    effects: list[Any] = []
    for peer in members:
        to = [each for each in members if each != peer]
        effects += desk.said(
            peer,
            Reached(
                {each: f"host-{each} port 7" for each in to if each not in outgoing},
                {each: f"no answer from host-{each} port 7" for each in to if each in outgoing},
            ),
        )
    return effects


def plan_of(effects: Any) -> Any:
    plans = [
        each.message.plan for each in effects if isinstance(each, Send) and isinstance(each.message, Reduce)
    ]
    return plans[0] if plans else None


def ready(desk: Desk, *peers: str) -> Any:
    return desk.ready(*peers, digest="d0")


def silent_desk(start_peers: int) -> Desk:
    desk = Desk(start_peers=start_peers, min_peers=2)
    desk.all_reach_all = False
    return desk


def open_desk(*peers: str) -> Desk:
    desk = silent_desk(len(peers))
    join(desk, *peers)
    return desk


def test_every_pair_dials_both_ways_and_newcomers_only_are_asked_about_again() -> None:
    desk = silent_desk(2)
    assert join(desk, "a") == {}
    assert join(desk, "b") == {"a": {"b"}, "b": {"a"}}
    assert join(desk, "c") == {"a": {"c"}, "b": {"c"}, "c": {"a", "b"}}


def test_a_round_waits_for_the_answers_and_no_longer_than_they_may_take() -> None:
    desk = open_desk("a", "b")
    assert plan_of(ready(desk, "a", "b")) is None
    assert "find out whom they can reach" in desk.state.recollection.waiting
    assert plan_of(desk.said("a", Reached({"b": "host-b port 7"}, {}))) is None, "b has not answered"
    assert plan_of(desk.said("b", Reached({"a": "host-a port 7"}, {}))) is not None

    desk = open_desk("a", "b")
    ready(desk, "a", "b")
    assert plan_of(desk.wait(TRIAL_S + ANSWER_S - 0.5, "a", "b")) is None
    assert plan_of(desk.wait(0.5, "a", "b")) is not None


def test_two_that_do_not_reach_each_other_are_planned_round_and_nobody_goes() -> None:
    desk = open_desk("a", "b", "c", "d")
    told = emitted(answers(desk, outgoing="ab"), events.ReachChanged)
    assert told[-1].none == (Edge("a", "b"),)
    assert set(told[-1].one_way) == {Edge(out, to) for out in "ab" for to in "cd"}
    assert told[-1].reasons["a -> b"] == "no answer from host-b port 7"
    plan = plan_of(ready(desk, "a", "b", "c", "d"))
    assert plan.members == ("a", "b", "c", "d")
    assert {lane.root for lane in plan.lanes} <= {"c", "d"}, "a star at a or b would need their edge"


def test_one_way_is_enough() -> None:
    desk = open_desk("a", "b")
    (told,) = emitted(answers(desk, outgoing="a"), events.ReachChanged)
    assert (told.none, told.one_way) == ((), (Edge("a", "b"),))
    assert {lane.root for lane in plan_of(ready(desk, "a", "b")).lanes} == {"a", "b"}


def test_no_way_round_is_tried_once_all_the_same_and_what_carried_a_round_exists() -> None:
    """A trial may have been too slow: before anybody is sent away the pair is tried by a round."""
    desk = open_desk("a", "b")
    answers(desk, outgoing="ab")
    plan = plan_of(ready(desk, "a", "b"))
    assert plan is not None
    stats = TransferStats(links=(LinkRate("a", "b", 1e6),))
    desk.said("a", Vote(plan.op, True, "r", (), "", stats))
    effects = desk.said("b", Vote(plan.op, True, "r", (), "", TransferStats()))
    assert desk.state.version == 1
    (told,) = emitted(effects, events.ReachChanged)
    assert told.none == ()
    assert broken_pairs(desk.state.ways, "ab") == frozenset()


def test_a_broken_edge_has_both_ends_dial_again() -> None:
    desk = open_desk("a", "b", "c")
    answers(desk)
    plan = plan_of(ready(desk, "a", "b", "c"))
    effects = []
    for peer in "abc":
        broken = (Edge("a", "b"),) if peer == "a" else ()
        effects += desk.said(peer, Vote(plan.op, peer != "a", "r", broken, "no link", TransferStats()))
    assert asked(effects) == {"a": {"b"}, "b": {"a"}}
    again = plan_of(effects)
    assert again.members == ("a", "b", "c"), "the next attempt goes round it and waits for nothing"


def test_what_a_round_broke_between_peers_of_several_ranks_is_not_made_good_by_a_trial_of_rank_0() -> None:
    desk = silent_desk(4)
    half = desk.layout[0].shape[0] // 2
    for peer in "abcd":
        both = (
            RankInfo(f"host-{peer}", 7, (Range(0, half),)),
            RankInfo(f"host-{peer}", 8, (Range(half, 2 * half),)),
        )
        desk.join(peer, ranks=both if peer == "b" else (RankInfo(f"host-{peer}", 7, ()),))
    answers(desk)
    plan = plan_of(ready(desk, "a", "b", "c", "d"))
    effects = []
    for peer in "abcd":
        broken = (Edge("a", "b"), Edge("a", "c")) if peer == "a" else ()
        effects += desk.said(peer, Vote(plan.op, peer != "a", "r", broken, "no link", TransferStats()))
    assert asked(effects) == {"a": {"b", "c"}, "b": {"a"}, "c": {"a"}}
    lost = frozenset({Edge("a", "b"), Edge("b", "a")})
    assert broken_pairs(desk.state.ways, "abcd") == lost, "a and c have one rank each: trials say it all"
    answers(desk)
    desk.wait(AGAIN_S - 1.0, "a", "b", "c", "d")
    answers(desk)
    assert broken_pairs(desk.state.ways, "abcd") == lost
    desk.wait(1.5, "a", "b", "c", "d")
    answers(desk)
    assert broken_pairs(desk.state.ways, "abcd") == frozenset()


def test_pairs_without_an_edge_are_asked_about_again_after_a_while() -> None:
    desk = open_desk("a", "b", "c")
    answers(desk, outgoing="ab")
    ready(desk, "a")
    assert asked(desk.wait(AGAIN_S - 0.5, "a", "b", "c")) == {}
    assert asked(desk.wait(0.5, "a", "b", "c")) == {"a": {"b"}, "b": {"a"}}
    desk.said("a", Reached({"b": "host-b port 7"}, {}))
    assert broken_pairs(desk.state.ways, "abc") == frozenset()


def test_a_process_that_took_a_peers_place_is_asked_anew() -> None:
    desk = open_desk("a", "b")
    answers(desk, outgoing="a")
    assert one_way(desk.state.ways, "ab")
    effects = desk.join("b", incarnation="2", ranks=(RankInfo("host-b", 8, ()),))
    assert asked(effects) == {"a": {"b"}, "b": {"a"}}
    assert desk.state.ways == {}


@pytest.mark.parametrize("count", [MOST_PEERS, MOST_PEERS + 1])
def test_a_crowd_is_not_asked(count: int) -> None:
    desk = silent_desk(count)
    told = join(desk, *(f"p{number:03}" for number in range(count)))
    assert bool(told.get("p064")) is False
    assert "p000" in told, "below the crowd's size pairs are asked about as they come"


def test_who_tells_no_port_is_dialled_by_nobody() -> None:
    desk = silent_desk(2)
    assert asked(desk.join("a", "b", ranks=(RankInfo("host-a", 0, ()),))) == {}
    assert plan_of(ready(desk, "a", "b")) is not None


def test_reports_of_strangers_pairs_are_not_taken() -> None:
    desk = open_desk("a", "b")
    desk.said("a", Reached({"a": "x", "z": "y", "b": "host-b port 7"}, {"z": "no", "b": "no"}))
    assert desk.state.ways == {("a", "b"): Way(ok=True, says="host-b port 7")}


WAYS = {
    ("a", "b"): Way(ok=False, says="no answer from host-b port 7"),
    ("b", "a"): Way(ok=False, says="no answer from host-a port 7"),
    ("a", "c"): Way(ok=True, says="host-c port 7"),
    ("c", "a"): Way(ok=False, says="no answer from host-a port 7"),
    ("b", "c"): Way(ok=True, says="host-c port 7"),
}


def test_the_matrix_as_a_value() -> None:
    assert rows(WAYS, ("a", "b", "c")) == (".-+", "-.+", "-?.")
    assert broken_pairs(WAYS, "abc") == {Edge("a", "b"), Edge("b", "a")}
    assert broken_pairs(WAYS, "ac") == frozenset()
    assert one_way(WAYS, "abc") == {Edge("a", "c")}, "whether c reaches b is not known"
    assert set(unreached(WAYS, "abc")) == {"a", "b"}


def shown(desk: Desk) -> str:
    console = Console(width=250, no_color=True)
    with console.capture() as captured:
        console.print(render(status.report(desk.state, desk.now_s)))
    return captured.get()


def test_the_status_shows_the_matrix_and_says_what_is_missing() -> None:
    desk = open_desk("a", "b", "c")
    answers(desk)
    told = status.report(desk.state, desk.now_s)
    assert told.reach is not None
    assert told.reach.rows == (".++", "+.+", "++.")
    assert "dials" not in shown(desk), "all is well: nothing to read"
    desk.state = msgspec.structs.replace(desk.state, ways=WAYS)
    text = shown(desk)
    assert "a and b do not reach each other, so rounds go round them" in text
    assert "nobody reaches a at host-a:7 (no answer from host-a port 7)" in text
    lines = text.splitlines()
    top = next(number for number, line in enumerate(lines) if line.startswith("dials"))
    assert [line.split() for line in lines[top : top + 4]] == [
        ["dials", "a", "b", "c"],
        ["a", "no", "yes"],
        ["b", "no", "yes"],
        ["c", "called", "?"],
    ]


AT_PORTS = RankInfo("203.0.113.5:7001", 7, (), more_hosts=("2001:db8::1", "[2001:db8::2]:7002"))
AT_PORTS_SHOWN = "203.0.113.5:7001, [2001:db8::1]:7, [2001:db8::2]:7002"


def test_the_status_shows_every_address_with_its_own_port() -> None:
    desk = silent_desk(3)
    for peer in "abc":
        desk.join(peer, ranks=(AT_PORTS,) if peer == "a" else (RankInfo(f"host-{peer}", 7, ()),))
    answers(desk, outgoing="a")
    assert f"nobody reaches a at {AT_PORTS_SHOWN} (" in shown(desk)


def test_who_is_dropped_is_told_every_address_with_its_own_port() -> None:
    desk = silent_desk(2)
    for peer in "ab":
        desk.join(peer, ranks=(AT_PORTS,))
    answers(desk)
    plan = plan_of(ready(desk, "a", "b"))
    for _ in range(2):
        desk.said("a", Vote(plan.op, False, "", (Edge("a", "b"),), "no link", TransferStats()))
        effects = desk.said("b", Vote(plan.op, False, "", (Edge("a", "b"),), "no link", TransferStats()))
        plan = plan_of(effects)
    assert f"a advertises {AT_PORTS_SHOWN}, b advertises {AT_PORTS_SHOWN}: see that" in repr(effects)


def test_above_sixteen_peers_only_sentences_are_shown() -> None:
    names = [f"p{number:02}" for number in range(17)]
    desk = silent_desk(17)
    join(desk, *names)
    way = Way(ok=False, says="no answer from host-x port 7")
    desk.state = msgspec.structs.replace(desk.state, ways={("p00", "p01"): way, ("p01", "p00"): way})
    text = shown(desk)
    assert not any(line.startswith("dials") for line in text.splitlines())
    assert "p00 and p01 do not reach each other" in text


def sources_told(more_hosts: dict[str, tuple[str, ...]], outgoing: str) -> tuple[Source, ...]:
    """What a newcomer to a run of a, b and c is told; nobody reaches those in `outgoing`."""
    desk = silent_desk(3)
    for peer in "abc":
        more = more_hosts.get(peer, ())
        desk.join(peer, ranks=(RankInfo(f"host-{peer}", 7, (), sidecar_port=9, more_hosts=more),))
    answers(desk, outgoing=outgoing)
    commit = ready(desk, "a", "b", "c")
    for peer in plan_of(commit).members:
        desk.vote(peer, "r")
    effects = desk.join("d", ranks=(RankInfo("host-d", 7, (), sidecar_port=9),))
    (order,) = [
        each.message for each in effects if isinstance(each, Send) and isinstance(each.message, CatchUp)
    ]
    return order.sources


def test_a_newcomer_is_told_all_hosts_of_a_donor_and_those_that_nobody_reaches_last() -> None:
    more = {"b": ("203.0.113.5", "[2001:db8::1]:7001"), "c": ("203.0.113.6",)}
    assert sources_told(more, outgoing="a") == (
        Source("b", "host-b", 9),
        Source("c", "host-c", 9),
        Source("a", "host-a", 9),
        Source("b", "203.0.113.5", 9),
        Source("c", "203.0.113.6", 9),
        Source("b", "2001:db8::1", 9),
    )


def test_a_donor_with_eight_hosts_does_not_take_the_places_of_the_others() -> None:
    more = {peer: tuple(f"host-{peer}-{number}" for number in range(7)) for peer in "abc"}
    told = sources_told(more, outgoing="")
    assert [each.peer for each in told] == list("abcabcab")
    assert [each.host for each in told[:3]] == ["host-a", "host-b", "host-c"]


def test_a_peer_dials_whatever_it_does_and_says_whom_it_reached() -> None:
    order = Reach({"b": RankInfo("host", 1, ())}, TRIAL_S)
    state = member.step(member.start("a", Timeouts(), 0.0).state, member.Connected(1), 0.0).state
    state = member.step(state, TrainerSaid(Declare((), {}, (), 0, 0, "d0", 0)), 0.0).state
    view = View(term=1, version=0, round=0, members=("a", "b"), started=True, reason="it starts")
    state = member.step(state, CoordinatorSaid(view), 0.0).state
    state = member.step(state, TrainerSaid(Ready(1, 0, "d0", 1, 1, 1.0, True)), 0.0).state
    assert state.phase is Phase.READY
    assert member.step(state, CoordinatorSaid(order), 0.0).effects == (MeasureLinks(order),)
    said = Reached({"b": "host port 1"}, {})
    assert member.step(state, TrainerSaid(said), 0.0).effects == (Send("", said),)


def test_further_hosts_cost_nothing_on_the_wire_where_there_are_none() -> None:
    encode = msgspec.msgpack.encode
    one = RankInfo("10.0.0.1", 7, ())
    assert len(encode(one)) < len(b"host10.0.0.1port7ranges") + 12
    several = RankInfo("10.0.0.1", 7, (), more_hosts=("10.0.0.2", "[::2]:8"))
    decode = msgspec.msgpack.Decoder(RankInfo).decode
    assert decode(encode(several)) == several
    said_before = {"host": "h", "port": 7, "ranges": [], "max_up": 0, "max_down": 0, "sidecar_port": 9}
    assert decode(encode(said_before)) == RankInfo("h", 7, (), sidecar_port=9)
    assert several.bare_hosts() == ("10.0.0.1", "10.0.0.2", "::2")
    forwarded = RankInfo("203.0.113.5:7001", 7, (), more_hosts=("203.0.113.5",))
    assert forwarded.bare_hosts() == ("203.0.113.5",), "a sidecar has a port of its own"
