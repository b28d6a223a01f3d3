"""K03: a peer that comes while the run goes on gets all of it, and counts from the next round; members do not wait."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from support.slack import SLACK_S
from support.swarm import Swarm, close_to

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]


@pytest.mark.parametrize("numel", [1, 3_000_000])
def test_a_late_joiner_gets_everything(tmp_path: Path, numel: int) -> None:
    """Parameters, outer momentum, round and step: the values of a run in which c takes part from round 2 on."""
    go = tmp_path / "go"
    hold = ["--numel", numel, "--hold-in-round", 1, "--until", go]
    with Swarm(tmp_path, start_peers=2) as swarm:
        a, b = swarm.quadratic("a", 1, *hold), swarm.quadratic("b", 3, *hold)
        swarm.wait(lambda: a.rounds() and b.rounds(), within_s=60, what="the first round")
        c = swarm.quadratic("c", 8, "--numel", numel, "--mark-ready-in-round", 1)
        swarm.wait_for_marker(c)
        go.touch()
        swarm.finish_well("a", "b", "c")
    assert close_to(a.thetas(), [1.089297, 3.138991, 4.701726]), a.thetas()
    assert b.thetas() == a.thetas()
    assert c.thetas() == a.thetas()[1:]
    assert [row["step"] for row in c.rounds()] == [10, 15]
    (caught_up,) = swarm.events("CaughtUp", "c")
    assert caught_up["version"] == 1
    assert caught_up["received_bytes"] > 0
    swarm.assert_one_history()


@pytest.mark.parametrize("hit", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_ten_times_in_a_row_under_one_id(tmp_path: Path, hit: signal.Signals) -> None:
    """K04, row 31: a process that starts again under its id is let in at once, while the old one is gone or merely
    stands still; the old one is fenced, and there are never two."""
    forever = ["--rounds", 10_000, "--round-s", 0.2]
    with Swarm(tmp_path, start_peers=2) as swarm:
        first = swarm.quadratic("a", 1, *forever)
        swarm.quadratic("b", 3, *forever)
        swarm.wait(lambda: len(first.rounds()) >= 2, within_s=60, what="two rounds")
        for number in range(10):
            third = swarm.quadratic("c", 8, *forever)
            started_s = time.monotonic()
            swarm.wait(
                lambda number=number: len(joins(swarm, "c")) > number,
                within_s=60,
                what=f"c's {number}. return",
            )
            waited_s = joins(swarm, "c")[number]["seconds"]
            assert waited_s <= 5 + SLACK_S, (
                f"{waited_s} s, {time.monotonic() - started_s:.1f} s with its start"
            )
            third.send(hit)
        for event in swarm.events():
            members = event.get("members", [])
            assert len(set(members)) == len(members), event
        assert len(joins(swarm, "c")) == 10
    swarm.assert_one_history()


def test_a_joiner_takes_a_donors_inner_state(tmp_path: Path) -> None:
    """inner.joiner = donor: the momentum of a member that trained on from the snapshot's version, though replaying
    one update would have been less."""
    go = tmp_path / "go"
    hold = ["--joiner", "donor", "--hold-in-round", 1, "--until", go]
    with Swarm(tmp_path, start_peers=2) as swarm:
        a, b = swarm.quadratic("a", 1, *hold), swarm.quadratic("b", 3, *hold)
        swarm.wait(lambda: a.rounds() and b.rounds(), within_s=60, what="the first round")
        swarm.quadratic("c", 8, "--joiner", "donor")
        swarm.wait(lambda: joins(swarm, "c"), within_s=60, what="c is let in")
        go.touch()
        swarm.finish_well()
    (caught_up,) = swarm.events("CaughtUp", "c")
    (taken,) = swarm.events("InnerStateTaken", "c")
    assert caught_up["snapshot_version"] == taken["version"] == 1
    assert taken["donor"] in ("a", "b")
    assert not swarm.events("InnerStateMissed", "c")
    swarm.assert_one_history()


def test_a_joiner_begins_fresh_where_no_donor_has_an_inner_state(tmp_path: Path) -> None:
    """As the run says donor, but nobody's optimizer keeps any state: it says so, and takes part all the same."""
    go = tmp_path / "go"
    hold = ["--joiner", "donor", "--inner-momentum", 0, "--hold-in-round", 1, "--until", go]
    with Swarm(tmp_path, start_peers=2) as swarm:
        a, b = swarm.quadratic("a", 1, *hold), swarm.quadratic("b", 3, *hold)
        swarm.wait(lambda: a.rounds() and b.rounds(), within_s=60, what="the first round")
        swarm.quadratic("c", 8, "--joiner", "donor", "--inner-momentum", 0)
        swarm.wait(lambda: joins(swarm, "c"), within_s=60, what="c is let in")
        go.touch()
        swarm.finish_well()
    (missed,) = swarm.events("InnerStateMissed", "c")
    assert missed["reason"] == "no donor staged one with the snapshot"
    swarm.assert_one_history()


def joins(swarm: Swarm, peer: str) -> list[dict[str, Any]]:
    return [event for event in swarm.events("PeerJoined") if event["peer"] == peer]


def test_links_of_new_members_are_measured_before_the_round_that_needs_them(tmp_path: Path) -> None:
    """At the start all pairs, later the newcomer's, both ways; nobody measures while a round runs."""
    go = tmp_path / "go"
    hold = ["--numel", 3_000_000, "--hold-in-round", 0, "--until", go]
    with Swarm(tmp_path, start_peers=2) as swarm:
        swarm.quadratic("a", 1, *hold)
        swarm.quadratic("b", 3, *hold)
        swarm.wait(lambda: probed(swarm) == {("a", "b"), ("b", "a")}, within_s=60, what="the first pair")
        swarm.quadratic("c", 8, "--numel", 3_000_000)
        newcomers = {("a", "c"), ("b", "c"), ("c", "a"), ("c", "b")}
        swarm.wait(lambda: newcomers < probed(swarm), within_s=60, what="the newcomer's links")
        assert swarm.events("AttemptStarted") == [], "measured while everybody waits"
        go.touch()
        swarm.finish_well("a", "b", "c")
    told = [event for event in swarm.events("RatesMeasured") if event["probed"]]
    assert all(link["bytes_per_s"] > 0 and link["rtt_s"] > 0 for event in told for link in event["links"])
    assert swarm.events("ProbesFailed") == []
    by_rounds = [event for event in swarm.events("RatesMeasured") if not event["probed"]]
    assert by_rounds, "the rounds' own traffic is told too"
    swarm.assert_one_history()


def probed(swarm: Swarm) -> set[tuple[str, str]]:
    told = [event["links"] for event in swarm.events("RatesMeasured") if event["probed"]]
    return {(link["source"], link["target"]) for links in told for link in links}
