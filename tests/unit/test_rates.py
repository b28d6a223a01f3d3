"""Rates from votes: newest count most, nobody speaks of other people's links, and only changes are shown."""

from __future__ import annotations

import pytest

from atoll.membership.rates import Rates, SeenRate, known_links, learn
from atoll.values import LinkRate

BOTH = ("a", "b")


def told(rates: Rates, round_: int, *links: LinkRate, by: str = "a") -> tuple[Rates, tuple[LinkRate, ...]]:
    return learn(rates, {by: links}, round_, BOTH)


def test_a_first_rate_is_taken_as_it_is_and_shown() -> None:
    link = LinkRate("a", "b", 100.0, 0.08)
    rates, changed = told({}, 1, link)
    assert known_links(rates) == changed == (link,)


def test_half_of_the_weight_goes_with_every_round() -> None:
    rates, _ = told({}, 1, LinkRate("a", "b", 100.0))
    rates, _ = told(rates, 2, LinkRate("a", "b", 20.0))
    assert rates["a", "b"].bytes_per_s == pytest.approx(60.0)
    rates, _ = told(rates, 5, LinkRate("a", "b", 20.0))
    assert rates["a", "b"].bytes_per_s == pytest.approx(25.0), "three rounds without news: an eighth is left"


def test_both_ends_count_once() -> None:
    reports = {"a": [LinkRate("a", "b", 100.0, 0.2)], "b": [LinkRate("a", "b", 50.0, 0.1)]}
    rates, _ = learn({}, reports, 1, BOTH)
    assert rates["a", "b"] == SeenRate(75.0, 0.1, 1, 75.0)


def test_an_unknown_round_trip_leaves_the_known_one() -> None:
    rates, _ = told({}, 1, LinkRate("a", "b", 1.0, 0.2))
    rates, _ = told(rates, 2, LinkRate("a", "b", 1.0, 0.0))
    assert rates["a", "b"].rtt_s == 0.2


def test_what_a_way_loses_is_its_sender_s_to_say_and_older_rounds_count_half() -> None:
    reports = {"a": [LinkRate("a", "b", 1.0, 0.1, 0.02)], "b": [LinkRate("a", "b", 1.0, 0.1)]}
    rates, _ = learn({}, reports, 1, BOTH)
    assert rates["a", "b"].loss == 0.02
    rates, _ = learn(rates, {"a": [LinkRate("a", "b", 1.0, 0.1)]}, 2, BOTH)
    assert rates["a", "b"].loss == 0.01
    assert known_links(rates) == (LinkRate("a", "b", 1.0, 0.1, 0.01),)


def test_only_changes_are_shown_slow_drifts_too() -> None:
    rates, shown = told({}, 1, LinkRate("a", "b", 100.0))
    assert len(shown) == 1
    counts = []
    for round_ in range(2, 12):
        rates, shown = told(rates, round_, LinkRate("a", "b", 100.0 + 4 * round_))
        counts.append(len(shown))
    assert 0 < sum(counts) <= 4


@pytest.mark.parametrize(
    "link",
    [
        LinkRate("b", "c", 1.0),
        LinkRate("a", "x", 1.0),
        LinkRate("a", "a", 1.0),
        LinkRate("", "", 1.0),
        LinkRate("a", "b", float("nan")),
        LinkRate("a", "b", float("inf")),
        LinkRate("a", "b", 0.0),
        LinkRate("a", "b", -1.0),
        LinkRate("a", "b", 1.0, float("nan")),
        LinkRate("a", "b", 1.0, 0.1, -0.1),
        LinkRate("a", "b", 1.0, 0.1, float("nan")),
    ],
)
def test_nonsense_and_other_peoples_links_are_ignored(link: LinkRate) -> None:
    assert told({}, 1, link) == ({}, ())


def test_lines_are_reported_too() -> None:
    rates, _ = told({}, 1, LinkRate("a", "", 100.0), LinkRate("", "a", 50.0), LinkRate("b", "", 7.0))
    assert set(rates) == {("a", ""), ("", "a")}


def test_who_is_gone_is_forgotten() -> None:
    rates, _ = learn({}, {"a": [LinkRate("a", "b", 1.0), LinkRate("a", "", 2.0)]}, 1, BOTH)
    rates, _ = learn(rates, {}, 2, ("a",))
    assert set(rates) == {("a", "")}
