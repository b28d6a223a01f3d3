"""K05, K06, K07 and a planted flipped bit: who takes part in a sum, decided alike by all."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.swarm import Swarm, close_to

pytestmark = [pytest.mark.fault, pytest.mark.timeout(150)]


@pytest.mark.parametrize("value", ["nan", "inf", "-1e6"])
def test_one_bad_update_is_left_out_by_all(tmp_path: Path, value: str) -> None:
    with Swarm(tmp_path, start_peers=3) as swarm:
        swarm.quadratic("a", 1, "--rounds", 3)
        swarm.quadratic("b", 3, "--rounds", 3)
        swarm.quadratic("c", 8, "--rounds", 3, "--poison-in-round", f"1:{value}")
        swarm.finish_well()
    for peer in swarm.peers.values():
        assert close_to(peer.thetas(), [2.178593, 3.010091, 4.343667]), (peer.name, peer.thetas())
    (left_out,) = swarm.events("PeerLeftOut")
    assert (left_out["peer"], left_out["round"]) == ("c", 2)
    assert left_out["reason"]
    swarm.assert_one_history()


def test_a_flipped_bit_in_one_anchor_is_found_before_it_enters_a_sum(tmp_path: Path) -> None:
    """Row 22: c is left out of that round only; it takes a good copy from the others, and counts in the next."""
    go = tmp_path / "go"
    hold = ["--hold-in-round", 2, "--until", go]
    with Swarm(tmp_path, start_peers=3) as swarm:
        first = swarm.quadratic("a", 1, *hold)
        swarm.quadratic("b", 3, *hold)
        third = swarm.quadratic("c", 8, "--flip-anchor-bit-in-round", 1, "--mark-ready-in-round", 2)
        swarm.wait_for_marker(third)
        go.touch()
        swarm.finish_well("a", "b", "c")
    (mismatch,) = swarm.events("DigestMismatch")
    assert mismatch["peer"] == "c"
    assert mismatch["expected"] != mismatch["found"]
    assert close_to(first.thetas(), [2.178593, 3.010091, 4.343667]), first.thetas()
    assert [row["version"] for row in third.rounds()] == [1, 3]
    snapshots = [event["snapshot_version"] for event in swarm.events("CaughtUp", "c")]
    assert 2 in snapshots or 1 in snapshots, "what it held was of no use"
    swarm.assert_one_history()


def test_below_the_minimum_the_run_waits_then_ends_with_exit_6(tmp_path: Path) -> None:
    with Swarm(tmp_path, start_peers=2, min_peers=2, quorum_wait_s=10.0) as swarm:
        first = swarm.quadratic("a", 1)
        second = swarm.quadratic("b", 3, "--halt-in-round", 1)
        swarm.wait_for_marker(second)
        second.send(signal.SIGKILL)
        assert swarm.finish("a") == {"a": 6}, first.output()
        swarm.wait(lambda: swarm.coordinator.poll() is not None, within_s=10, what="the coordinator's end")
        assert swarm.coordinator.returncode == 6
    assert "min_peers" in first.output()
    assert close_to(first.thetas(), [1.089297])


@pytest.mark.parametrize(
    ("difference", "named"),
    [
        (["--numel", 2], "theta"),
        (["--inner-steps", 4, "--rounds", 3], "inner_steps"),
        (["--momentum", 0.8], "momentum"),
        (["--codec", "int8"], "codec"),
    ],
)
def test_peers_that_differ_are_refused_with_the_first_difference(
    tmp_path: Path, difference: list[object], named: str
) -> None:
    with Swarm(tmp_path, start_peers=2) as swarm:
        swarm.quadratic("a", 1)
        swarm.wait(lambda: swarm.events("PeerJoined"), within_s=30, what="the first peer")
        odd = swarm.quadratic("b", 3, *difference)
        assert swarm.finish("b") == {"b": 5}, odd.output()
        assert named in odd.output()
        (refused,) = swarm.events("PeerRefused")
        assert named in refused["reason"]
        swarm.quadratic("b2", 3)
        swarm.finish_well("a", "b2")
    assert close_to(swarm.peers["a"].thetas(), [1.089297, 2.049694, 2.652032])
