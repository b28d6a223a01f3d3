"""The quadratic's golden values over real processes, through the public API, fp32 codec, 1e-5 (hard cases, harness).

Each case also shows that every round had one digest on all members.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.swarm import Swarm, close_to

pytestmark = [pytest.mark.fault, pytest.mark.timeout(150)]

EIGHT_ROUNDS = [1.089297, 2.049694, 2.652032, 2.851829, 2.735918, 2.450546, 2.138182, 1.898031]


def run(
    tmp_path: Path, centers: list[float], *arguments: object, extra: dict[int, list[object]] | None = None
) -> Swarm:
    """Peers a, b, c, ... with these centers, run to their end; all must exit 0."""
    swarm = Swarm(tmp_path, start_peers=len(centers))
    with swarm:
        for index, center in enumerate(centers):
            swarm.quadratic("abcdef"[index], center, *arguments, *(extra or {}).get(index, []))
        swarm.finish_well()
    swarm.assert_one_history()
    return swarm


def check(swarm: Swarm, expected: list[float]) -> None:
    for peer in swarm.peers.values():
        assert close_to(peer.thetas(), expected), (peer.name, peer.thetas(), expected)


def test_two_peers_eight_rounds(tmp_path: Path) -> None:
    check(run(tmp_path, [1, 3], "--rounds", 8), EIGHT_ROUNDS)


def test_a_lone_peer_takes_its_own_outer_steps(tmp_path: Path) -> None:
    check(run(tmp_path, [2]), [1.089297, 2.049694, 2.652032])


def test_three_peers(tmp_path: Path) -> None:
    check(run(tmp_path, [1, 3, 8]), [2.178593, 4.099388, 5.304065])


def test_plain_averaging(tmp_path: Path) -> None:
    check(run(tmp_path, [1, 3], "--lr", 1.0, "--momentum", 0.0), [0.819020, 1.302643, 1.588218])


def test_token_weights(tmp_path: Path) -> None:
    swarm = run(tmp_path, [1, 3], extra={0: ["--tokens", 1], 1: ["--tokens", 3]})
    check(swarm, [1.361621, 2.562117, 3.315040])


@pytest.mark.parametrize(
    ("weights", "expected"), [("equal", [0.651374, 1.320753]), ("tokens", [0.605635, 1.190121])]
)
def test_second_peer_managed_two_of_five_steps(tmp_path: Path, weights: str, expected: list[float]) -> None:
    swarm = run(tmp_path, [1, 3], "--rounds", 2, "--weights", weights, extra={1: ["--steps-made", 2]})
    check(swarm, expected)


def test_second_peer_is_cut_off_by_the_deadline(tmp_path: Path) -> None:
    """Policy `deadline`: the first peer is a quorum and ready, the second made 2 of 5 steps when the round closes."""
    swarm = Swarm(tmp_path, start_peers=2, min_peers=1, policy="deadline", grace_s=2.0)
    with swarm:
        # The first takes a second for its steps: with grace_s, ample time for the second's two.
        swarm.quadratic("a", 1, "--rounds", 2, "--round-s", 1)
        swarm.quadratic("b", 3, "--rounds", 2, "--steps-made", 2, "--wait-for-freeze")
        swarm.finish_well()
    check(swarm, [0.605635, 1.190121])
    assert [event["weights"] for event in swarm.events("RoundCommitted")] == [[5, 2], [5, 2]]
    assert [row["contributors"] for row in swarm.peers["b"].rounds()] == [["a", "b"]] * 2
    swarm.assert_one_history()


@pytest.mark.parametrize("weights", ["equal", "tokens"])
def test_second_peer_managed_no_step(tmp_path: Path, weights: str) -> None:
    swarm = run(tmp_path, [1, 3], "--rounds", 2, "--weights", weights, extra={1: ["--steps-made", 0]})
    check(swarm, [0.544648, 1.024847])
    assert [row["contributors"] for row in swarm.peers["b"].rounds()] == [["a"], ["a"]]


def test_an_inner_schedule_follows_the_runs_step(tmp_path: Path) -> None:
    check(run(tmp_path, [1, 3], "--rounds", 4, "--halve-lr-at", 10), [1.089297, 2.049694, 2.664147, 3.024414])


def test_third_peer_killed_before_round_two(tmp_path: Path) -> None:
    with Swarm(tmp_path, start_peers=3) as swarm:
        swarm.quadratic("a", 1)
        swarm.quadratic("b", 3)
        third = swarm.quadratic("c", 8, "--halt-in-round", 1)
        swarm.wait_for_marker(third)
        third.send(signal.SIGKILL)
        swarm.finish_well("a", "b")
    assert third.process.returncode == -signal.SIGKILL
    for name in "ab":
        assert close_to(swarm.peers[name].thetas(), [2.178593, 3.010091, 3.254371]), swarm.peers[
            name
        ].thetas()
    swarm.assert_one_history()
    assert [event["peer"] for event in swarm.events("PeerLost")] == ["c"]


def test_second_peer_leaves_after_two_rounds(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, start_peers=2)
    with swarm:
        swarm.quadratic("a", 1, "--rounds", 4)
        swarm.quadratic("b", 3, "--rounds", 4, "--leave-after", 2)
        swarm.finish_well()
    assert close_to(swarm.peers["a"].thetas(), [1.089297, 2.049694, 2.107384, 1.826982]), swarm.peers[
        "a"
    ].thetas()
    assert [event["peer"] for event in swarm.events("PeerLeft")][:1] == ["b"]
    swarm.assert_one_history()


def test_int8_gives_one_digest_on_all_members(tmp_path: Path) -> None:
    swarm = run(tmp_path, [1, 3, 8], "--codec", "int8", "--numel", 1000)
    for peer in swarm.peers.values():
        assert close_to(peer.thetas(), [2.178593, 4.099388, 5.304065], tolerance=1e-3), peer.thetas()
