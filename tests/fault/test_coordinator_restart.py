"""The coordinator is killed and started again on its journal: peers reconnect, no round is lost or done twice."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from support.slack import SLACK_S
from support.swarm import Swarm, close_to

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

GOLDEN = [1.089297, 2.049694, 2.652032, 2.851829]


def test_killed_while_peers_train(tmp_path: Path) -> None:
    with Swarm(tmp_path, start_peers=2) as swarm:
        swarm.quadratic("a", 1, "--rounds", 4, "--round-s", 1)
        swarm.quadratic("b", 3, "--rounds", 4, "--round-s", 1)
        swarm.wait(lambda: swarm.peers["a"].rounds(), within_s=90, what="the first round")
        swarm.kill_coordinator()
        swarm.restart_coordinator()
        swarm.finish_well()
    assert [event["term"] for event in swarm.events("CoordinatorListening")] == [1, 2]
    for peer in swarm.peers.values():
        assert close_to(peer.thetas(), GOLDEN), (peer.name, peer.thetas())
    swarm.assert_one_history()


def test_killed_while_one_peer_waits_in_a_round(tmp_path: Path) -> None:
    """One peer waits with its update encoded and sent as ready; it never steps on an unknown verdict."""
    with Swarm(tmp_path, start_peers=2) as swarm:
        waits = swarm.quadratic("a", 1, "--rounds", 4, "--mark-ready-in-round", 1)
        trains = swarm.quadratic("b", 3, "--rounds", 4, "--round-s", 3, "--mark-ready-in-round", 1)
        swarm.wait_for_marker(waits)
        swarm.kill_coordinator()
        assert not trains.marker.exists(), "the fault came too late: both were ready"
        assert len(waits.rounds()) == 1, "the fault came too late: the round was over"
        swarm.restart_coordinator()
        swarm.finish_well()
    for peer in swarm.peers.values():
        assert close_to(peer.thetas(), GOLDEN), (peer.name, peer.thetas())
    versions = [event["version"] for event in swarm.events("RoundCommitted")]
    assert versions == [1, 2, 3, 4]
    swarm.assert_one_history()


def test_gone_for_good_ends_its_peers_with_exit_4(tmp_path: Path) -> None:
    """One peer waits; the other trains on to the end of its round, and then waits too. Both name the address."""
    with Swarm(tmp_path, start_peers=2, coordinator_lost_s=6.0) as swarm:
        waits = swarm.quadratic("a", 1, "--mark-ready-in-round", 1)
        trains = swarm.quadratic("b", 3, "--round-s", 3, "--mark-ready-in-round", 1)
        swarm.wait_for_marker(waits)
        swarm.kill_coordinator()
        assert not trains.marker.exists(), "the fault came too late: both were ready"
        killed_at_s = time.monotonic()
        lost = swarm.settings["coordinator_lost_s"] + SLACK_S
        assert swarm.finish(within_s=lost) == {"a": 4, "b": 4}, swarm.logs()
        assert time.monotonic() - killed_at_s < lost
    for peer in (waits, trains):
        assert swarm.address in peer.output()
        assert "Traceback" not in peer.output()
        assert close_to(peer.thetas(), GOLDEN[:1]), "nothing was committed after the coordinator's end"


def test_a_run_that_is_over_is_not_begun_again_by_its_journal(tmp_path: Path) -> None:
    with Swarm(tmp_path, start_peers=1) as swarm:
        swarm.quadratic("a", 2, "--rounds", 1)
        swarm.finish_well()
        swarm.wait(lambda: swarm.coordinator.poll() is not None, within_s=10, what="the coordinator's end")
        assert swarm.coordinator.returncode == 0
        swarm.start_ended_coordinator()
        assert swarm.coordinator.wait(timeout=60) == 0
    assert "is over already" in swarm.logs()
