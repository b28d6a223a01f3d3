"""What the run's links were seen to carry, as members report it with their votes: pure, and newest counts most.

A value loses half of its weight with every round, so that a line that got slow is known within two. Both ends of a
link report it; a member is heard only about its own links. Kept by the coordinator, not in the journal: a restarted
one begins without and has learned everything anew after its first round.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec

from atoll.values import LinkRate

WORTH_SHOWING = 0.1
"""A rate is shown again once it differs by this part from what was shown last."""

Link = tuple[str, str]


class SeenRate(msgspec.Struct, frozen=True):
    """A link's rate (bytes per second), round trip and loss as of `round`; `shown` is the rate last told in an event.
    `probed`: measured by a short probe; a round's own traffic, once there is any, takes its place.
    """

    bytes_per_s: float
    rtt_s: float
    round: int
    shown: float = 0.0
    probed: bool = False
    loss: float = 0.0


Rates = dict[Link, SeenRate]


def learn(
    known: Rates,
    reports: Mapping[str, Sequence[LinkRate]],
    round_: int,
    members: Collection[str],
    *,
    probed: bool = False,
) -> tuple[Rates, tuple[LinkRate, ...]]:
    """The rates after one round's `reports` (by who reports), and those that changed enough to be shown.

    What is known of links to others than `members` is forgotten. Probes (`probed`) teach only what is not known.
    """
    living = {*members, ""}
    rates = {link: seen for link, seen in known.items() if link[0] in living and link[1] in living}
    changed = []
    for link, heard in sorted(_by_link(reports, living).items()):
        if probed and link in rates:
            continue
        seen = msgspec.structs.replace(_merged(rates.get(link), heard, round_), probed=probed)
        if abs(seen.bytes_per_s - seen.shown) > WORTH_SHOWING * seen.shown:
            seen = msgspec.structs.replace(seen, shown=seen.bytes_per_s)
            changed.append(_as_value(link, seen))
        rates[link] = seen
    return rates, tuple(changed)


def known_links(rates: Rates) -> tuple[LinkRate, ...]:
    return tuple(_as_value(link, seen) for link, seen in rates.items())


def _as_value(link: Link, seen: SeenRate) -> LinkRate:
    return LinkRate(*link, seen.bytes_per_s, seen.rtt_s, seen.loss)


_last_uplinks: tuple[Rates, dict[str, float]] = ({}, {})


def by_uplink(rates: Rates) -> dict[str, float]:
    """The rates of the members' uplinks that are known, fastest first. It is asked for in every step while somebody
    catches up, and rates never change but in a new dict, so the last answer holds for the very same one."""
    global _last_uplinks
    asked, found = _last_uplinks
    if asked is not rates:
        uplinks = [(seen.bytes_per_s, link[0]) for link, seen in rates.items() if link[1] == ""]
        found = {peer: rate for rate, peer in sorted(uplinks, key=lambda each: -each[0])}
        _last_uplinks = (rates, found)
    return found


def _by_link(reports: Mapping[str, Sequence[LinkRate]], living: set[str]) -> dict[Link, list[LinkRate]]:
    """What was said about each link; nonsense, and what nobody can know, left out."""
    heard: dict[Link, list[LinkRate]] = {}
    for peer, links in reports.items():
        for each in links:
            own = peer in (each.source, each.target) and each.source != each.target
            sane = 0 < each.bytes_per_s < math.inf and 0 <= each.rtt_s < math.inf and 0 <= each.loss <= 1
            if own and sane and each.source in living and each.target in living:
                heard.setdefault((each.source, each.target), []).append(each)
    return heard


def _merged(known: SeenRate | None, heard: Sequence[LinkRate], round_: int) -> SeenRate:
    rate = sum(each.bytes_per_s for each in heard) / len(heard)
    trips_s = [each.rtt_s for each in heard if each.rtt_s > 0]
    rtt_s = min(trips_s) if trips_s else 0.0
    loss = max(each.loss for each in heard)  # the sender's: the other end does not know
    if known is None or known.probed:
        return SeenRate(rate, rtt_s, round_, shown=known.shown if known else 0.0, loss=loss)
    kept = 0.5 ** max(1, round_ - known.round)
    return SeenRate(
        bytes_per_s=kept * known.bytes_per_s + (1 - kept) * rate,
        rtt_s=kept * known.rtt_s + (1 - kept) * rtt_s if known.rtt_s and rtt_s else rtt_s or known.rtt_s,
        round=round_,
        shown=known.shown,
        loss=kept * known.loss + (1 - kept) * loss,
    )
