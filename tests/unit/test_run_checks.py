"""What is said of a run and of the ways to its members, from facts that are given."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from atoll.cli.checks import run as checks
from atoll.cli.checks.pace import seconds_per_round
from atoll.cli.checks.run import LOOPBACK, Way, ways_out
from atoll.cli.checks.screen import show
from atoll.cli.checks.ways import _measure
from atoll.membership.examination import Examined, MemberSeen
from atoll.membership.examining_link import Examination
from atoll.values import LinkRate, RankInfo

MBIT = 125_000


def told(**more: Any) -> Examined:
    members = tuple(
        MemberSeen(peer, RankInfo(f"10.0.0.{i}", 7000, ())) for i, peer in enumerate(("bern", "oslo"))
    )
    links = (LinkRate("bern", "oslo", 80 * MBIT, 0.02), LinkRate("oslo", "bern", 80 * MBIT, 0.02))
    values = {
        "run": "r",
        "package": "9.9.9",
        "seen_host": "10.0.0.9",
        "seen_port": 1,
        "wall_time_s": 0.0,
        "mapping_ports": (),
        "members": members,
        "num_members": 2,
        "links": links,
        "wire_bytes": 10_000_000,
        "elements": 10_000_000,
        "codec": "int8",
        "topology": "auto",
        "connections": 0,
        "inner_steps": 100,
        "round_s": 60.0,
        "max_up": {},
        "max_down": {},
    }
    return Examined(**(values | more))


def way(peer: str, why_not: str = "", rate: float = 80 * MBIT) -> Way:
    return Way(
        peer=peer, host="10.0.0.1", port=7000, tried=True, bytes_per_s=rate, rtt_s=0.02, why_not=why_not
    )


def test_a_slow_machine_makes_rounds_longer_and_that_is_said() -> None:
    slow = [way("bern", rate=8 * MBIT), way("oslo", rate=8 * MBIT)]
    found = seconds_per_round(told(), slow, reachable=True)
    details = found.details
    assert found.grade == "ok"
    assert details["sync_s"] > 5 > details["sync_without_s"] > 0
    assert "rounds of 100 inner steps took 60 s lately" in found.sentence
    quick = seconds_per_round(told(), [way("bern"), way("oslo")], reachable=True)
    assert quick.details["sync_s"] < details["sync_s"]


def test_a_machine_that_nobody_reaches_and_that_reaches_nobody_has_no_plan() -> None:
    shut = [way("bern", "no answer"), way("oslo", "no answer")]
    found = seconds_per_round(told(), shut, reachable=False)
    assert (found.grade, found.about) == ("problem", "out")
    assert "sent away" in found.sentence
    assert seconds_per_round(told(), shut, reachable=True).grade == "ok", "the others dial it"
    one = seconds_per_round(told(), [way("bern", "no answer"), way("oslo")], reachable=False)
    assert one.grade == "ok"


def test_before_a_first_member_nothing_is_predicted() -> None:
    assert "not known" in seconds_per_round(told(members=(), num_members=0), [], reachable=True).sentence
    assert "not known" in seconds_per_round(told(wire_bytes=0), [], reachable=True).sentence


@pytest.mark.parametrize(
    ("reachable", "others", "grade"),
    [(True, True, "warning"), (True, False, "problem"), (False, True, "problem")],
)
def test_a_member_out_of_reach_is_as_grave_as_it_is(reachable: bool, others: bool, grade: str) -> None:
    ways = [way("bern", "could not connect to 10.0.0.1 port 7000: connection refused")]
    ways += [way("oslo")] if others else []
    *_, found = ways_out(ways, reachable=reachable)
    assert found.grade == grade
    assert "no way from here to bern at 10.0.0.1:7000 (connection refused)" in found.sentence
    assert ("has to dial this machine" in found.sentence) == (grade == "warning")


def test_a_member_that_advertises_loopback_is_told_on_which_machine_to_mend_it() -> None:
    *_, found = ways_out([way("bern", LOOPBACK), way("oslo")], reachable=True)
    assert "bern tells others 10.0.0.1:7000, which is loopback" in found.sentence
    assert found.remedy.startswith("on bern's machine")


def test_all_addresses_of_a_member_are_shown_with_their_ports() -> None:
    forwarded = Way(
        peer="bern",
        host="203.0.113.5:7001",
        port=40000,
        tried=True,
        why_not="no answer in 1 s",
        more_hosts=("10.0.0.1", "2001:db8::1", "[2001:db8::2]:7002"),
    )
    every = "203.0.113.5:7001, 10.0.0.1:40000, [2001:db8::1]:40000, [2001:db8::2]:7002"
    *_, found = ways_out([forwarded], reachable=True)
    assert f"bern at {every} (no answer in 1 s)" in found.sentence
    console = Console(width=200, no_color=True)
    with console.capture() as captured:
        show(console, "title", {}, [forwarded], "fit")
    assert every in captured.get()


def test_what_was_not_tried_is_no_finding() -> None:
    assert ways_out([Way(peer="bern", host="10.0.0.1", port=1)], reachable=True) == []


@pytest.mark.parametrize(
    ("ahead_s", "rtt_s", "grade", "says"),
    [
        (0.01, 0.1, "ok", "the coordinator's, to within 50 ms"),
        (1.5, 0.1, "ok", "1.5 s behind the coordinator's"),
        (-30.0, 0.1, "warning", "30 s ahead of the coordinator's"),
        (-600.0, 0.1, "problem", "10 min ahead of"),
        (3.0, 4.0, "ok", "3 s behind"),
    ],
)
def test_the_clock_is_known_to_half_a_round_trip(ahead_s: float, rtt_s: float, grade: str, says: str) -> None:
    seen = Examination(
        address="a:1", told=told(), coordinator_host="h", own_host="o", rtt_s=rtt_s, ahead_s=ahead_s
    )
    found = checks.clock(seen)
    assert found.grade == grade
    assert says in found.sentence


def test_another_version_of_the_same_protocol_is_a_warning() -> None:
    seen = Examination(address="a:1", told=told(), coordinator_host="h", own_host="o", rtt_s=0.1, ahead_s=0.0)
    found = checks.package(seen)
    assert (found.grade, found.remedy) == ("warning", "pip install atoll-train==9.9.9")


class Reaching:
    """An engine that reaches whatever it is told to probe."""

    def probe(self, *_: object) -> tuple[float, float, str]:
        return 1e6, 0.02, ""


@pytest.mark.parametrize(
    ("hosts", "why_not"),
    [
        (("127.0.0.1:7001", "10.0.0.1"), ""),
        (("10.0.0.1", "127.0.0.1"), ""),
        (("127.0.0.1:7001", "[::1]:7001"), LOOPBACK),
    ],
)
def test_a_member_is_judged_by_all_its_hosts(hosts: tuple[str, ...], why_not: str) -> None:
    member = MemberSeen("bern", RankInfo(hosts[0], 7000, (), more_hosts=hosts[1:]))
    found = _measure(Reaching(), member, 1, elsewhere=True)  # type: ignore[arg-type]
    assert (found.why_not, found.more_hosts) == (why_not, hosts[1:])
