"""The coordinator is killed and started again on its journal: peers reconnect, no round is lost or done twice."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.swarm import Swarm, close_to

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

GOLDEN = [1.089297, 2.049694, 2.652032, 2.851829]


def kill_and_restart(swarm: Swarm) -> None:
    swarm.coordinator.send_signal(signal.SIGKILL)
    swarm.coordinator.wait(timeout=10)
    swarm.restart_coordinator()


def test_killed_while_peers_train(tmp_path: Path) -> None:
    with Swarm(tmp_path, start_peers=2) as swarm:
        swarm.quadratic("a", 1, "--rounds", 4, "--round-s", 1)
        swarm.quadratic("b", 3, "--rounds", 4, "--round-s", 1)
        swarm.wait(lambda: swarm.peers["a"].rounds(), within_s=90, what="the first round")
        kill_and_restart(swarm)
        swarm.finish_well()
    assert [event["term"] for event in swarm.events("CoordinatorListening")] == [1, 2]
    for peer in swarm.peers.values():
        assert close_to(peer.thetas(), GOLDEN), (peer.name, peer.thetas())
    swarm.assert_one_history()


def test_killed_while_one_peer_waits_in_a_round(tmp_path: Path) -> None:
    """One peer is frozen with its update encoded and sent as ready; it never steps on an unknown verdict."""
    with Swarm(tmp_path, start_peers=2) as swarm:
        fast = swarm.quadratic("a", 1, "--rounds", 4)
        swarm.quadratic("b", 3, "--rounds", 4, "--round-s", 3)
        swarm.wait(lambda: fast.rounds(), within_s=90, what="the first round")
        kill_and_restart(swarm)  # a is ready at once, b trains for 3 s: the coordinator goes while a waits
        swarm.finish_well()
    for peer in swarm.peers.values():
        assert close_to(peer.thetas(), GOLDEN), (peer.name, peer.thetas())
    versions = [event["version"] for event in swarm.events("RoundCommitted")]
    assert versions == [1, 2, 3, 4]
    swarm.assert_one_history()


def test_a_run_that_is_over_is_not_begun_again_by_its_journal(tmp_path: Path) -> None:
    with Swarm(tmp_path, start_peers=1) as swarm:
        swarm.quadratic("a", 2, "--rounds", 1)
        swarm.finish_well()
        swarm.wait(lambda: swarm.coordinator.poll() is not None, within_s=10, what="the coordinator's end")
        assert swarm.coordinator.returncode == 0
        swarm.start_ended_coordinator()
        assert swarm.coordinator.wait(timeout=60) == 0
    assert "is over already" in swarm.logs()
