"""A thousand random schedules hold all invariants, and each planted bug is found."""

from __future__ import annotations

import pytest

from atoll.sim.schedule_bugs import BUGS
from atoll.sim.schedules import replay_command, run_schedule

SEEDS_PER_TEST = 250
SEEDS_TO_FIND_A_BUG = 400


@pytest.mark.parametrize("first", range(0, 1000, SEEDS_PER_TEST))
def test_all_invariants_hold(first: int) -> None:
    committed = 0
    for seed in range(first, first + SEEDS_PER_TEST):
        outcome = run_schedule(seed)
        assert not outcome.violation, f"{outcome.violation}; replay with: {replay_command(seed, None)}"
        committed += outcome.versions
    assert committed > 2 * SEEDS_PER_TEST, "the schedules hardly commit anything: they prove nothing"


@pytest.mark.parametrize("bug", sorted(BUGS))
def test_planted_bug_is_found(bug: str) -> None:
    for seed in range(SEEDS_TO_FIND_A_BUG):
        if run_schedule(seed, BUGS[bug]).violation:
            return
    pytest.fail(f"{SEEDS_TO_FIND_A_BUG} schedules do not find {bug}")


def test_a_seed_is_a_schedule() -> None:
    lines: list[list[tuple[float, str, str]]] = [[], []]
    for transcript in lines:
        run_schedule(
            11, None, lambda now_s, who, what, reason, to=transcript: to.append((now_s, who, reason))
        )
    assert lines[0] == lines[1]
    assert len(lines[0]) > 50
