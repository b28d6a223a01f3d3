"""Dynamic local updates: a peer that is three times slower makes a third of the steps, and nobody waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.swarm import Swarm

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]

STEPS, FAST_S, SLOW_S = 24, 0.02, 0.06


def test_nobody_waits_for_a_peer_three_times_slower(tmp_path: Path) -> None:
    """Only the first round, when no speed is known yet, takes as long as the slow peer needs for all the steps."""
    common = ["--steps-by-speed", "--inner-steps", STEPS, "--rounds", 6]
    with Swarm(tmp_path, start_peers=2) as swarm:
        fast = swarm.quadratic("fast", 1, *common, "--step-s", FAST_S)
        slow = swarm.quadratic("slow", 3, *common, "--step-s", SLOW_S)
        swarm.finish_well()
    quick, late = swarm.events("RoundApplied", "fast")[1:], swarm.events("RoundApplied", "slow")[1:]
    for event in late:
        assert STEPS / 5 < event["inner_steps"] < STEPS / 2, (
            "about a third, whatever this machine did meanwhile"
        )
    assert [event["inner_steps"] for event in quick] == [STEPS] * 5
    # The median: on a machine with other work one round may wait for anything.
    ratios = sorted((q["compute_s"] + q["wait_s"]) / s["compute_s"] for q, s in zip(quick, late, strict=True))
    assert ratios[len(ratios) // 2] <= 1.25, ratios
    assert (
        [row["step"] for row in fast.rounds()]
        == [row["step"] for row in slow.rounds()]
        == [STEPS * number for number in range(1, 7)]
    )
    swarm.assert_one_history()
