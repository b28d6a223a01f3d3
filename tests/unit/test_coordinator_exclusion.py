"""Who contributes with which weight: absent without work, out if not finite or far out, the same for
everybody.
"""

from __future__ import annotations

import math
import random

import pytest

from atoll.membership import exclusion
from atoll.membership.exclusion import REMEMBERED_NORMS, remember_norms, select, usual_norm
from atoll.membership.messages import Ready
from atoll.values import Contribution


def ready(tokens: int = 100, steps: int = 10, norm: float = 1.0, finite: bool = True) -> Ready:
    return Ready(round=1, version=0, digest="d", tokens=tokens, steps=steps, norm=norm, finite=finite)


def chosen(
    readies: dict[str, Ready], committed: tuple[float, ...] = (), equal: bool = False
) -> dict[str, int]:
    selection = select(readies, committed, norm_limit=100.0, equal=equal)
    return {each.peer: each.weight for each in selection.contributions}


def test_weights_are_tokens_without_their_common_divisor() -> None:
    assert chosen({"b": ready(300), "a": ready(100)}) == {"a": 1, "b": 3}
    assert chosen({"a": ready(2 * 10**15), "b": ready(3 * 10**15)}) == {"a": 2, "b": 3}


def test_equal_weights() -> None:
    assert chosen({"a": ready(300), "b": ready(100)}, equal=True) == {"a": 1, "b": 1}


@pytest.mark.parametrize("idle", [ready(steps=0), ready(tokens=0), ready(tokens=0, steps=0, norm=0.0)])
def test_a_peer_without_work_is_absent_and_not_at_fault(idle: Ready) -> None:
    selection = select({"a": ready(), "b": idle}, (), norm_limit=100.0, equal=True)
    assert selection.contributions == (Contribution("a", 1),)
    assert (selection.idle, selection.left_out) == (("b",), {})


@pytest.mark.parametrize(
    "bad",
    [
        ready(finite=False),
        ready(norm=math.nan),
        ready(norm=math.inf),
        ready(tokens=0, norm=0.0, finite=False),
        ready(tokens=0, steps=0, norm=0.0, finite=False),
    ],
)
def test_not_finite_is_left_out_with_a_sentence(bad: Ready) -> None:
    selection = select({"a": ready(), "b": bad}, (), norm_limit=100.0, equal=False)
    assert [each.peer for each in selection.contributions] == ["a"]
    assert "not finite" in selection.left_out["b"]
    assert selection.idle == ()
    assert not selection.diverging


def test_work_of_which_none_is_finite_is_diverging() -> None:
    bad, idle = ready(tokens=0, norm=0.0, finite=False), ready(tokens=0, steps=0, norm=0.0)

    def diverging(readies: dict[str, Ready], committed: tuple[float, ...] = ()) -> bool:
        return select(readies, committed, norm_limit=100.0, equal=False).diverging

    assert diverging({"a": bad, "b": bad})
    assert diverging({"a": bad, "b": idle})
    assert not diverging({"a": bad, "b": ready()})
    assert not diverging({"a": idle})
    assert not diverging({"a": bad, "b": ready(norm=1e6)}, committed=(1.0,)), "far out is finite"


def test_a_norm_far_above_the_median_is_left_out() -> None:
    readies = {"a": ready(norm=1.0), "b": ready(norm=1.2), "c": ready(norm=1e6)}
    assert set(chosen(readies)) == {"a", "b"}
    assert "1e+06" in select(readies, (), norm_limit=100.0, equal=False).left_out["c"]


def test_a_lone_peer_is_held_against_its_own_history() -> None:
    assert chosen({"a": ready(norm=1e6)}) == {"a": 1}, "nothing to compare with"
    assert chosen({"a": ready(norm=1e6)}, committed=(1.0, 1.0)) == {}


def test_zero_norms_say_nothing_and_vanishing_ones_do_not_exclude() -> None:
    assert set(chosen({"a": ready(norm=0.0), "b": ready(norm=0.0), "c": ready(norm=1.0)})) == {"a", "b", "c"}
    assert usual_norm([1e-30], []) == pytest.approx(1e-8)
    assert usual_norm([0.0], []) is None
    assert set(chosen({"a": ready(norm=1e-30), "b": ready(norm=1e-20), "c": ready(norm=1e-7)})) == {
        "a",
        "b",
        "c",
    }


def test_one_median_is_remembered_for_each_committed_round() -> None:
    norms: tuple[float, ...] = ()
    for number in range(20):
        norms = remember_norms(norms, (float(number), 100.0, 0.0))
    assert len(norms) == REMEMBERED_NORMS
    assert norms[-1] == pytest.approx((19 + 100) / 2)
    assert remember_norms(norms, (0.0,)) == norms


def test_any_readies_give_one_ordered_selection() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        names = rng.sample("abcdefgh", rng.randint(1, 8))
        readies = {
            name: ready(rng.choice((0, 1, 60, 77)), rng.choice((0, 3)), rng.choice((0.0, 1.0, 1e9, math.nan)))
            for name in names
        }
        selection = select(readies, (1.0,), norm_limit=100.0, equal=False)
        peers = [each.peer for each in selection.contributions]
        assert peers == sorted(peers)
        assert not set(peers) & (set(selection.left_out) | set(selection.idle))
        assert set(peers) | set(selection.left_out) | set(selection.idle) == set(names)
        weights = [each.weight for each in selection.contributions]
        assert not weights or (min(weights) > 0 and math.gcd(*weights) == 1)
        assert selection == select(dict(sorted(readies.items())), (1.0,), norm_limit=100.0, equal=False)


def test_probation_begins_with_the_third_refusal_and_ends_by_itself() -> None:
    offences: exclusion.Offences = {}
    for round_ in (2, 5, 9):
        assert not exclusion.probation(offences, round_)
        offences = exclusion.remember_offences(offences, {"c"}, round_)
    assert exclusion.probation(offences, 10)["c"].endswith("refused in rounds 2, 5, 9")
    assert exclusion.probation(offences, 17)
    assert not exclusion.probation(offences, 18)
    assert not exclusion.remember_offences(offences, (), 18), "what is long ago is forgotten"


def test_an_update_of_a_peer_on_probation_is_better_than_none() -> None:
    ready = Ready(1, 0, "d0", 10, 1, 1.0, True)
    on_probation = {"c": "it is on probation"}
    both = exclusion.select(
        {"a": ready, "c": ready}, (), norm_limit=100.0, equal=False, probation=on_probation
    )
    assert [each.peer for each in both.contributions] == ["a"]
    assert both.left_out == on_probation
    alone = exclusion.select({"c": ready}, (), norm_limit=100.0, equal=False, probation=on_probation)
    assert [each.peer for each in alone.contributions] == ["c"]
