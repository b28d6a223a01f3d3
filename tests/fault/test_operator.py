"""An operator looks at a run of real processes, and ends it, or a part of it: status, stop, leave and evict."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.membership.operator import Status
from support.slack import SLACK_S
from support.swarm import Peer, Swarm

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

LONG = ("--rounds", 1000, "--inner-steps", 1000, "--step-s", 0.02)  # rounds of 20 s
SHORT = ("--rounds", 1000, "--inner-steps", 5, "--step-s", 0.02)


def wait_for_status(swarm: Swarm, holds: Callable[[Status], bool], what: str) -> None:
    """Ask ten times a second: it is not free for a test that shares its processors with the peers."""
    deadline_s = time.monotonic() + 90
    while not holds(found := swarm.status()):
        assert time.monotonic() < deadline_s, f"{what}: {found}\n{swarm.logs()}"
        time.sleep(0.1)


def wait_for_state(swarm: Swarm, peer: str, state: str) -> None:
    def holds(found: Status) -> bool:
        return any((each.peer, each.state) == (peer, state) for each in found.peers)

    wait_for_status(swarm, holds, f"{peer} {state}")


def wait_for_steps(swarm: Swarm, *peers: str) -> None:
    """They train: the coordinator has heard of steps in this round."""

    def train(found: Status) -> bool:
        steps = {each.peer: each.steps_in_round for each in found.peers}
        return all(steps.get(peer, 0) > 0 for peer in peers)

    wait_for_status(swarm, train, "inner steps")


def ended(swarm: Swarm, peer: Peer, within_s: float) -> int:
    asked_s = time.monotonic()
    (code,) = swarm.finish(peer.name, within_s=within_s).values()
    print(f"{peer.name} ended {time.monotonic() - asked_s:.2f} s later with {code}")
    return code


# ---- status ----------------------------------------------------------------------------------------------


def test_a_status_explains_why_a_round_waits(tmp_path: Path) -> None:
    long = ("--numel", 500_000)  # so that there is a rate to measure
    with Swarm(tmp_path, start_peers=3, dead_s=60.0, coordinator_lost_s=90.0) as swarm:
        first = swarm.quadratic("a", 1, *long, "--mark-ready-in-round", 1)
        frozen = swarm.quadratic("b", 3, *long, "--halt-in-round", 1)
        halted = swarm.quadratic("c", 8, *long, "--halt-in-round", 1)
        for peer in (first, frozen, halted):
            swarm.wait_for_marker(peer)
        wait_for_state(swarm, "a", "ready")
        frozen.send(signal.SIGSTOP)
        wait_for_state(swarm, "b", "silent")
        as_json, table = swarm.order("status", "--json"), swarm.order("status")
    assert (as_json.returncode, as_json.stderr, as_json.stdout.count("\n")) == (0, "", 1)
    found = json.loads(as_json.stdout)
    states = {each["peer"]: each["state"] for each in found["peers"]}
    assert states == {"a": "ready", "b": "silent", "c": "training"}
    assert (found["version"], found["round"], found["started"]) == (1, 2, True)
    assert found["waiting"] == "round 2: 1 of 3 ready, waiting for b, c"
    assert any(why.startswith("b is silent for ") and "dead_s = 60 s" in why for why in found["why"])
    assert any(why.startswith("c is not ready yet (step 1 of 5)") for why in found["why"])
    assert {each["tokens"] for each in found["peers"]} == {5}
    assert {(each["source"], each["target"]) for each in found["links"]} >= {("a", "b"), ("b", "a")}
    assert (table.returncode, table.stderr) == (0, "")
    for word in ("a ", "b ", "c ", "silent", "step 1 of 5", "waiting for b, c", "sends to"):
        assert word in table.stdout


def test_statuses_in_a_row_hold_up_no_round(tmp_path: Path) -> None:
    """Forty and more, one after the other, while rounds go on: each sees a version, and none goes back."""
    with Swarm(tmp_path, start_peers=2) as swarm:
        for name, center in (("a", 1), ("b", 3)):
            swarm.quadratic(name, center, "--rounds", 100_000)
        swarm.wait(lambda: swarm.events("RoundCommitted"), within_s=90, what="a round")
        versions: list[int] = []

        def asked() -> bool:
            versions.append(swarm.status().version)
            return len(versions) >= 40 and versions[-1] > versions[0]

        swarm.wait(asked, within_s=90, what="a round among the statuses")
        assert versions == sorted(versions)
        assert not swarm.events("PeerLost")
        assert not swarm.events("AttemptFailed")


# ---- stop ------------------------------------------------------------------------------------------------


def test_a_stop_ends_the_run_with_its_open_round_for_all(tmp_path: Path) -> None:
    with Swarm(tmp_path, start_peers=2) as swarm:
        for name, center in (("a", 1), ("b", 3)):
            swarm.quadratic(name, center, *LONG)
        wait_for_steps(swarm, "a", "b")
        done = swarm.order("stop", "--reason", "good enough")
        assert (done.returncode, done.stdout) == (
            0,
            "round 1 is the last: it is closed now, and ends the run\n",
        )
        swarm.finish_well(within_s=SLACK_S + 5)
        swarm.wait(lambda: swarm.coordinator.poll() is not None, within_s=10, what="the coordinator's end")
        assert swarm.coordinator.returncode == 0
        swarm.assert_one_history()
        (committed,) = swarm.events("RoundCommitted")
        assert committed["contributors"] == ["a", "b"]
        for name in "ab":
            (over,) = swarm.events("RunEnded", source=name)
            assert over["reason"] == "the run was stopped by an operator: good enough"
        again = swarm.order("stop")
    assert again.returncode == 4
    assert "no coordinator at" in again.stderr


def test_a_stop_outlives_the_coordinator_that_heard_it(tmp_path: Path) -> None:
    """Killed before the last round has its verdict, it is started again, and the run still ends."""
    with Swarm(tmp_path, start_peers=2, freeze_s=60.0) as swarm:
        swarm.quadratic("a", 1, *LONG)
        halted = swarm.quadratic("b", 3, *LONG, "--halt-in-round", 0)
        swarm.wait_for_marker(halted)
        wait_for_steps(swarm, "a")
        assert swarm.order("stop").returncode == 0
        swarm.kill_coordinator()
        assert not swarm.events("RoundCommitted"), "the fault came too late"
        halted.send(signal.SIGKILL)
        swarm.restart_coordinator()
        swarm.finish_well("a")
        swarm.wait(lambda: swarm.coordinator.poll() is not None, within_s=10, what="the coordinator's end")
        assert swarm.coordinator.returncode == 0
        (committed,) = swarm.events("RoundCommitted")
        assert committed["contributors"] == ["a"]


def test_a_stop_does_not_wait_for_a_frozen_peer(tmp_path: Path) -> None:
    with Swarm(tmp_path, start_peers=2, dead_s=60.0, coordinator_lost_s=90.0, freeze_s=2.0) as swarm:
        swarm.quadratic("a", 1, *LONG)
        frozen = swarm.quadratic("b", 3, *LONG)
        wait_for_steps(swarm, "a", "b")
        frozen.send(signal.SIGSTOP)
        assert swarm.order("stop").returncode == 0
        swarm.finish_well("a", within_s=2.0 + SLACK_S)
        (committed,) = swarm.events("RoundCommitted")
        assert committed["contributors"] == ["a"]


def test_a_stop_before_the_start_ends_those_who_wait(tmp_path: Path) -> None:
    with Swarm(tmp_path, start_peers=2) as swarm:
        waits = swarm.quadratic("a", 1)
        swarm.wait(lambda: swarm.events("PeerJoined"), within_s=90, what="a peer")
        assert swarm.order("stop", "--reason", "wrong recipe").returncode == 0
        assert ended(swarm, waits, SLACK_S) == 0
        assert "Dismissed: the run was stopped by an operator: wrong recipe" in waits.output()
        swarm.wait(lambda: swarm.coordinator.poll() is not None, within_s=10, what="the coordinator's end")
        assert swarm.coordinator.returncode == 0


# ---- leave -----------------------------------------------------------------------------------------------


def test_who_is_asked_to_leave_goes_politely_and_the_others_go_on(tmp_path: Path) -> None:
    """dead_s is long on purpose: only a goodbye lets the other go on at once."""
    with Swarm(tmp_path, start_peers=2, dead_s=60.0, coordinator_lost_s=90.0) as swarm:
        stays = swarm.quadratic("a", 1, *SHORT)
        goes = swarm.quadratic("b", 3, *SHORT)
        swarm.wait(lambda: len(stays.rounds()) >= 2, within_s=90, what="two rounds")
        done = swarm.order("leave", "b", "--reason", "needed elsewhere")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("b is asked to leave; it goes ")
        assert ended(swarm, goes, SLACK_S) == 0
        rounds = len(stays.rounds())
        swarm.wait(lambda: len(stays.rounds()) > rounds + 1, within_s=SLACK_S, what="rounds of one")
    (left,) = swarm.events("PeerLeft")
    assert (left["peer"], left["reason"]) == ("b", "asked to leave by an operator: needed elsewhere")
    assert not swarm.events("PeerLost")
    (over,) = swarm.events("RunEnded", source="b")
    assert (over["reason"], over["exit_code"]) == ("asked to leave by an operator: needed elsewhere", 0)


# ---- evict -----------------------------------------------------------------------------------------------


def test_the_evicted_is_gone_at_once_and_stays_outside(tmp_path: Path) -> None:
    with Swarm(tmp_path, start_peers=2) as swarm:
        stays = swarm.quadratic("a", 1, *SHORT)
        goes = swarm.quadratic("b", 3, *SHORT)
        swarm.wait(lambda: len(stays.rounds()) >= 2, within_s=90, what="two rounds")
        done = swarm.order("evict", "b", "--for", "10m", "--reason", "broken memory")
        assert (done.returncode, done.stdout) == (0, "b is evicted, and its id is refused for 600 s\n")
        assert ended(swarm, goes, SLACK_S) == 5
        assert "'b' was evicted and is refused for another 600 s: broken memory" in goes.output()
        rounds = len(stays.rounds())
        swarm.wait(lambda: len(stays.rounds()) > rounds + 1, within_s=SLACK_S, what="rounds of one")
        (evicted,) = swarm.status().evicted
        assert (evicted.peer, evicted.reason) == ("b", "broken memory")
        again = swarm.quadratic("b", 3, *SHORT)
        assert ended(swarm, again, 60) == 5
        assert "is refused for another" in again.output()
    assert [event["peer"] for event in swarm.events("PeerEvicted")] == ["b"]


def test_a_frozen_peer_can_be_evicted_before_anybody_notices(tmp_path: Path) -> None:
    with Swarm(tmp_path, start_peers=2, dead_s=60.0, coordinator_lost_s=90.0) as swarm:
        stays = swarm.quadratic("a", 1, *SHORT)
        frozen = swarm.quadratic("b", 3, *SHORT)
        swarm.wait(lambda: len(stays.rounds()) >= 2, within_s=90, what="two rounds")
        frozen.send(signal.SIGSTOP)
        rounds = len(stays.rounds())
        assert swarm.order("evict", "b").returncode == 0
        swarm.wait(lambda: len(stays.rounds()) > rounds + 2, within_s=10 + SLACK_S, what="rounds of one")
        frozen.send(signal.SIGCONT)
        assert ended(swarm, frozen, SLACK_S) == 5
