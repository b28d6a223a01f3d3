"""The oracle of quadratic runs: it agrees with the closed form, and finds every planted mistake."""

from __future__ import annotations

import pytest

from support.quadratic_oracle import Commit, Quadratic, Seen, wrong_values

CENTERS = {"a": 1.0, "b": 3.0, "c": 8.0}
COMMITS = (Commit(1, {"a": 1, "b": 1}), Commit(2, {"a": 5, "b": 5, "c": 2}), Commit(3, {"a": 1, "c": 1}))
STEPS = {(1, "a"): 5, (1, "b"): 5, (2, "a"): 5, (2, "b"): 5, (2, "c"): 2, (3, "a"): 5, (3, "c"): 5}


def values(commits: tuple[Commit, ...] = COMMITS) -> list[Seen]:
    state, found = Quadratic(CENTERS), []
    for commit in commits:
        state.commit(commit.weights, {peer: STEPS[commit.version, peer] for peer in commit.weights})
        found.append(Seen(commit.version, "a", state.theta))
    return found


def test_it_has_the_values_of_the_closed_form() -> None:
    state = Quadratic(CENTERS)
    state.commit({"a": 1, "b": 1}, {"a": 5, "b": 5})
    state.commit({"a": 1, "b": 1, "c": 1}, {"a": 5, "b": 5, "c": 5})
    assert state.theta == pytest.approx(3.138991, abs=1e-6)


def test_a_true_history_is_explained() -> None:
    assert wrong_values(COMMITS, CENTERS, STEPS, values()) == []


def test_a_contributor_that_died_before_it_could_tell_is_known_by_its_weight() -> None:
    told = {key: steps for key, steps in STEPS.items() if key not in {(1, "b"), (2, "c")}}
    assert wrong_values(COMMITS, CENTERS, told, values()) == []


@pytest.mark.parametrize(
    ("commits", "sentence"),
    [
        ((COMMITS[0], Commit(2, {"a": 5, "b": 5}), COMMITS[2]), "version 2: a has"),
        ((COMMITS[0], Commit(2, {"a": 1, "b": 1, "c": 1}), COMMITS[2]), "version 2: weights"),
        (COMMITS[:2], "version 3 was applied, but 2 is the last"),
        ((COMMITS[0], COMMITS[2]), "version 2 was never decided"),
    ],
    ids=["contributor missed", "wrong weights", "value without decision", "gap"],
)
def test_a_planted_mistake_is_found(commits: tuple[Commit, ...], sentence: str) -> None:
    wrong = wrong_values(commits, CENTERS, STEPS, values())
    assert any(sentence in each for each in wrong), wrong


def test_a_value_that_is_off_by_the_smallest_contribution_is_found() -> None:
    found = values()
    off = Seen(2, "b", found[1].theta * 1.0002)
    assert len(wrong_values(COMMITS, CENTERS, STEPS, [*found, off])) == 1
