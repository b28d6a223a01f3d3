"""What several ranks saw of the same links, as one; and what is known to be lost."""

from __future__ import annotations

from atoll.plan.links import carried_at_once, measured_links, without
from atoll.values import Edge, LinkRate


def test_rates_add_up_and_the_shortest_round_trip_counts() -> None:
    seen = [LinkRate("a", "b", 3.0, 0.09), LinkRate("a", "b", 4.0, 0.08), LinkRate("a", "", 5.0)]
    assert carried_at_once(seen) == (LinkRate("a", "b", 7.0, 0.08), LinkRate("a", "", 5.0))


def test_a_round_trip_that_is_not_known_says_nothing() -> None:
    for pair in ((0.0, 0.08), (0.08, 0.0)):
        (link,) = carried_at_once(LinkRate("a", "b", 1.0, rtt_s) for rtt_s in pair)
        assert link == LinkRate("a", "b", 2.0, 0.08)
    assert carried_at_once([LinkRate("b", "a", 1.0), LinkRate("a", "b", 1.0)])[0].source == "b", (
        "each way by itself"
    )


def test_ranks_share_a_way_and_what_it_loses() -> None:
    seen = [LinkRate("a", "b", 3.0, 0.09, 0.01), LinkRate("a", "b", 4.0, 0.08)]
    assert carried_at_once(seen) == (LinkRate("a", "b", 7.0, 0.08, 0.01),)


def test_losses_are_each_way_s_own_and_stay_when_links_break() -> None:
    links = measured_links("abc", [LinkRate("a", "b", 1e6, 0.1, 0.01), LinkRate("b", "a", 1e6, 0.1)])
    assert links.loss is not None
    assert links.loss.tolist() == [[0, 0.01, 0], [0, 0, 0], [0, 0, 0]]
    assert without(links, {Edge("b", "c")}).loss is links.loss
    assert measured_links("ab", [LinkRate("a", "b", 1e6, 0.1)]).loss is None
