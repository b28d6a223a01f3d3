"""Round lengths and outer settings are functions of the run's step."""

from __future__ import annotations

from atoll.diloco.schedule import OuterSchedule, RoundShape


def rounds(schedule: OuterSchedule, limit: int = 100) -> list[RoundShape]:
    found, step = [], 0
    while not schedule.finished(step) and len(found) < limit:
        found.append(schedule.round_at(step))
        step += found[-1].inner_steps
    return found


def test_the_last_round_may_be_shorter() -> None:
    schedule = OuterSchedule.constant(30, 0.7, 0.9, total_steps=70)
    assert [r.inner_steps for r in rounds(schedule)] == [30, 30, 10]


def test_short_stages_average_and_momentum_is_switched_on_when_they_end() -> None:
    schedule = OuterSchedule.of([(12, 5, None, None), (0, 30, None, None)], 0.7, 0.9, total_steps=72)
    shapes = rounds(schedule)
    assert [r.inner_steps for r in shapes] == [5, 5, 2, 30, 30]
    assert [(r.lr, r.momentum) for r in shapes] == [(1.0, 0.0)] * 3 + [(0.7, 0.9)] * 2


def test_a_stage_may_name_its_own_outer_step() -> None:
    schedule = OuterSchedule.of([(4, 2, 0.5, 0.3), (0, 8, 0.9, None)], 0.7, 0.9)
    assert schedule.round_at(0) == RoundShape(2, 0.5, 0.3, True)
    assert schedule.round_at(4) == RoundShape(8, 0.9, 0.9, True)
    assert not schedule.finished(10**9)
