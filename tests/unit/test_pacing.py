"""Steps by speed: all members are ready together, nobody trains next to nothing, and the run's step is one history."""

from __future__ import annotations

import random

import pytest

from atoll.membership import coordinator
from atoll.membership.messages import Ready, Verdict
from atoll.membership.pacing import FLOOR, steps_by_speed
from atoll.membership.steps import Effect, Send, VerdictMade
from support.desk import SETTINGS, Desk


def ready(steps: int, train_s: float, round_steps: int = 100) -> Ready:
    return Ready(1, 0, "d", 10 * steps, steps, 1.0, True, train_s=train_s, round_steps=round_steps)


def test_a_slow_member_makes_as_many_steps_as_it_can_in_the_time_of_the_fastest() -> None:
    assert steps_by_speed({"a": ready(100, 10.0), "b": ready(100, 30.0)}) == {"a": 100, "b": 33}
    assert steps_by_speed({"a": ready(100, 10.0), "b": ready(33, 9.9)}) == {"a": 100, "b": 33}, "it stays so"


def test_speeds_that_are_alike_are_the_same() -> None:
    assert steps_by_speed({"a": ready(100, 10.0), "b": ready(100, 11.0)}) == {"a": 100, "b": 100}


def test_there_is_a_floor() -> None:
    assert steps_by_speed({"a": ready(100, 1.0), "b": ready(1, 100.0)}) == {"a": 100, "b": -(-100 // FLOOR)}
    assert steps_by_speed({"a": ready(3, 1.0, 3), "b": ready(1, 100.0, 3)}) == {"a": 3, "b": 1}


def test_who_made_no_step_is_not_named_and_the_last_round_names_nobody() -> None:
    assert steps_by_speed({"a": ready(10, 1.0), "b": ready(0, 5.0)}) == {"a": 100}
    assert steps_by_speed({"a": ready(0, 1.0)}) == {}
    assert steps_by_speed({"a": ready(10, 1.0, 0), "b": ready(10, 3.0, 0)}) == {}
    assert steps_by_speed({}) == {}


@pytest.mark.parametrize("seed", range(20))
def test_any_speeds_arrive_within_a_step_of_each_other_or_at_the_floor(seed: int) -> None:
    rng = random.Random(seed)
    speeds = {f"p{index}": rng.uniform(0.2, 30.0) for index in range(rng.randint(1, 9))}
    round_steps = rng.randint(1, 500)
    named = steps_by_speed({peer: ready(50, 50 / speed, round_steps) for peer, speed in speeds.items()})
    fastest_s = round_steps / max(speeds.values())
    floor = max(1, -(-round_steps // FLOOR))
    for peer, steps in named.items():
        assert floor <= steps <= round_steps
        assert steps == floor or steps / speeds[peer] <= max(fastest_s / 0.9, fastest_s + 1 / speeds[peer])


# ---- the coordinator's machine ---------------------------------------------------------------------------


def verdicts(effects: tuple[Effect, ...]) -> dict[str, Verdict]:
    return {e.peer: e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Verdict)}


def round_of(desk: Desk) -> dict[str, Verdict]:
    """a makes its ten steps in a second, b in three; both commit."""
    desk.ready("a", train_s=1.0, round_steps=12)
    desk.ready("b", train_s=3.0, round_steps=12)
    desk.vote("a", "result")
    return verdicts(desk.vote("b", "result"))


def by_speed(on: bool = True) -> Desk:
    desk = Desk(start_peers=2)
    desk.run_settings = {**SETTINGS, "outer.steps_by_speed": on}
    desk.join("a", "b")
    return desk


def test_the_verdict_names_the_next_rounds_steps_and_the_journal_has_them() -> None:
    desk = by_speed()
    told = round_of(desk)
    assert set(told) == {"a", "b"}
    assert all(verdict.inner_steps == {"a": 12, "b": 4} for verdict in told.values())
    (made,) = [each for each in desk.journal if isinstance(each, VerdictMade)]
    assert made.verdict.inner_steps == {"a": 12, "b": 4}
    again = coordinator.start(desk.settings, desk.journal, b"k", None, desk.now_s).state
    assert again.commit == made.verdict, "who waited for it hears the same from the next coordinator"


def test_all_make_the_same_steps_where_the_run_does_not_say_so() -> None:
    assert all(verdict.inner_steps == {} for verdict in round_of(by_speed(on=False)).values())
