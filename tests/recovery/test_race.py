"""Can a peer catch up? Only what is clear is said: three updates further behind, and too slow whenever bytes came."""

from __future__ import annotations

import pytest

from atoll.recovery.meter import Meter
from atoll.recovery.race import Race


def lost(
    race: Race, version: int, now_s: float, bytes_per_s: float = 100.0, active_s: float = 6.0
) -> float | None:
    return race.lost(
        version=version, update_bytes=1000, bytes_per_s=bytes_per_s, active_s=active_s, now_s=now_s
    )


def test_a_peer_that_is_too_slow_is_told_the_rate_it_needs() -> None:
    race = Race()
    assert lost(race, 5, 0.0) is None
    assert lost(race, 7, 4.0) is None, "two updates say little"
    assert lost(race, 8, 6.0) == pytest.approx(500.0)


def test_a_peer_that_is_fast_enough_is_not() -> None:
    race = Race()
    for version in range(50):
        assert lost(race, version, version * 2.0, bytes_per_s=501.0) is None


def test_a_peer_that_keeps_up_is_not_though_little_comes_at_a_time() -> None:
    race = Race()
    for version in range(50):
        assert lost(race, version, version * 2.0, bytes_per_s=1.0) is None
        race.replayed_one()


def test_nothing_is_said_before_bytes_came_for_a_while() -> None:
    race = Race()
    lost(race, 0, 0.0)
    assert lost(race, 50, 10.0, active_s=4.0) is None


def test_after_a_snapshot_it_is_measured_anew() -> None:
    race = Race()
    lost(race, 0, 0.0)
    race.restart()
    assert lost(race, 9, 10.0) is None
    assert lost(race, 11, 11.0) is None
    assert lost(race, 12, 12.0) is not None


def test_the_meter_counts_time_in_which_bytes_come() -> None:
    meter = Meter()
    meter.add(7, 0.0)  # late news of something that was called off
    meter.begin(10.0)
    meter.begin(10.2)
    meter.add(100, 10.5)
    meter.add(100, 11.0)
    meter.add(100, 15.0)  # after a stall
    meter.end()
    meter.begin(100.0)
    meter.add(93, 101.0 - 1e-9)
    assert meter.active_s == pytest.approx(2.0)
    assert meter.bytes_per_s == pytest.approx(200.0)
