"""What several ranks saw of the same links, as one."""

from __future__ import annotations

from atoll.plan.links import carried_at_once
from atoll.values import LinkRate


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
