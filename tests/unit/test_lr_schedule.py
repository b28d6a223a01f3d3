"""The learning rate at the ends of its parts, and that it depends on nothing but the run's step."""

from __future__ import annotations

import math

import pytest

from atoll.train.lr_schedule import Kind, LRSchedule


def schedule(kind: Kind, **changes: float) -> LRSchedule:
    values = {
        "peak_lr": 2.0,
        "total_steps": 100,
        "warmup_steps": 10,
        "decay_fraction": 0.2,
        "min_lr_ratio": 0.1,
    }
    return LRSchedule(kind=kind, **{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_and_ends_at_the_peak(kind: Kind) -> None:
    lr = schedule(kind)
    assert lr(0) == pytest.approx(0.2)
    assert lr(4) == pytest.approx(1.0)
    assert lr(9) == 2.0


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_without_warm_up_the_first_step_has_the_peak(kind: Kind) -> None:
    assert schedule(kind, warmup_steps=0)(0) == 2.0


def test_cosine() -> None:
    lr = schedule("cosine")
    assert lr(10) == 2.0
    assert lr(55) == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert 0.2 < lr(99) < 0.202
    assert lr(100) == lr(1000) == pytest.approx(0.2)


def test_wsd_is_stable_and_then_falls_in_a_line() -> None:
    lr = schedule("wsd")
    assert lr(10) == lr(79) == lr(80) == 2.0
    assert lr(90) == pytest.approx(2.0 * 0.55)
    assert lr(99) == pytest.approx(2.0 * (0.1 + 0.9 / 20))
    assert lr(100) == lr(500) == pytest.approx(0.2)


def test_wsd_without_a_decay_is_constant_to_the_last_step() -> None:
    assert schedule("wsd", decay_fraction=0.0)(99) == 2.0


def test_constant() -> None:
    assert {schedule("constant")(step) for step in (9, 10, 99, 100, 10**9)} == {2.0}


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize(("warmup", "total"), [(200, 100), (100, 100), (99, 100), (0, 1), (1, 1)])
def test_odd_lengths_stay_between_zero_and_the_peak(kind: Kind, warmup: int, total: int) -> None:
    lr = schedule(kind, warmup_steps=warmup, total_steps=total)
    for step in range(total + 5):
        assert 0 < lr(step) <= 2.0
        assert math.isfinite(lr(step))


def test_floor_zero_is_reached_only_after_the_last_step() -> None:
    lr = schedule("cosine", min_lr_ratio=0.0)
    assert lr(99) > 0
    assert lr(100) == 0


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_never_rises_after_the_warm_up(kind: Kind) -> None:
    rates = [schedule(kind)(step) for step in range(9, 120)]
    assert rates == sorted(rates, reverse=True)
