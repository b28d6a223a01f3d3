"""What is known of who can dial whom, as a value: pure functions of it, for plans and for people."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from atoll.values import Edge


class Way(msgspec.Struct, frozen=True, order=True):
    """Whether a peer can dial another; `says` is the address that answered, or why none did. Until `holds_until_s`, on
    the coordinator's clock, no trial changes it."""

    ok: bool
    says: str = ""
    holds_until_s: float = 0.0


Ways = dict[tuple[str, str], Way]
"""By (who dials, who is dialled); what is not in it is not known."""


def broken_pairs(ways: Ways, members: Collection[str]) -> frozenset[Edge]:
    """Both directions of the pairs that have no edge: each end has tried, and neither reached the other."""
    living = set(members)
    return frozenset(
        Edge(*pair)
        for pair, way in ways.items()
        if not way.ok and living.issuperset(pair) and _failed(ways.get((pair[1], pair[0])))
    )


def one_way(ways: Ways, members: Collection[str]) -> frozenset[Edge]:
    """The working directions of pairs of which only one works."""
    living = set(members)
    return frozenset(
        Edge(*pair)
        for pair, way in ways.items()
        if way.ok and living.issuperset(pair) and _failed(ways.get((pair[1], pair[0])))
    )


def unreached(ways: Ways, members: Collection[str]) -> dict[str, Way]:
    """Members whom nobody reaches although somebody tried, and what one of those found."""
    found: dict[str, Way] = {}
    reached = {target for (_, target), way in ways.items() if way.ok}
    for (_, target), way in sorted(ways.items()):
        if target in members and target not in reached:
            found.setdefault(target, way)
    return found


def rows(ways: Ways, members: Collection[str]) -> tuple[str, ...]:
    """A line for each member, a letter for each that it may dial: "+" it can, "-" it cannot, "?" not
    known, "." itself."""
    return tuple("".join(_letter(ways, source, target) for target in members) for source in members)


def _letter(ways: Ways, source: str, target: str) -> str:
    if source == target:
        return "."
    way = ways.get((source, target))
    return "?" if way is None else "+" if way.ok else "-"


def _failed(way: Way | None) -> bool:
    return way is not None and not way.ok
