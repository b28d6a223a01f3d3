"""The two-level lanes: sums are made inside a region, and only one copy crosses the thin links.

Regions come from the rates alone: members are joined in the order of their fastest links; where the rate drops most,
what was joined so far are the regions. In a lane every region but the root's has a *head*: its members send to the
head, the head to the root, and back. Roots and heads go around, so that every thin link and every member has its part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atoll.plan.grid import Int64s
from atoll.plan.links import Links
from atoll.plan.shapes import Tree

LEAST_DROP = 2
"""Links between regions are at least so many times slower than those that hold a region together."""
MOST_CUTS = 3
MOST_LANES = 256

Region = tuple[int, ...]


def region_cuts(links: Links) -> list[tuple[Region, ...]]:
    """Ways to cut the members into regions, the clearest first; [] where no link is much thinner than the others."""
    joins = _joins(links)
    rates = [rate for rate, _, _ in joins]
    drops = [
        (rates[k] / max(rates[k + 1], 1), k + 1)
        for k in range(len(rates) - 1)
        if rates[k] >= LEAST_DROP * rates[k + 1]
    ]
    best = sorted(drops, key=lambda drop: (-drop[0], drop[1]))[:MOST_CUTS]
    return [_regions(len(links), joins[:count]) for _, count in best]


def two_level(regions: Sequence[Region], links: Links) -> list[Tree]:
    """One lane for every root and every turn of the heads; [] if a region does not hold together, or none can cross."""
    n = sum(len(region) for region in regions)
    largest = max(len(region) for region in regions)
    turns = max(1, min(largest, MOST_LANES // n))
    lanes = [
        tree
        for home, region in enumerate(regions)
        for place, root in enumerate(region)
        for turn in range(turns)
        if (tree := _lane(regions, home, root, place + turn, links)) is not None
    ]
    return lanes


def _lane(regions: Sequence[Region], home: int, root: int, turn: int, links: Links) -> Tree | None:
    parents = np.full(sum(len(region) for region in regions), root, dtype=np.int64)
    for number, region in enumerate(regions):
        if number != home:
            head = region[turn % len(region)]
            parents[list(region)] = head
            parents[head] = root
    nodes = np.flatnonzero(np.arange(len(parents)) != root)
    return Tree(root, parents, parents) if links.usable[nodes, parents[nodes]].all() else None


def _joins(links: Links) -> list[tuple[int, int, int]]:
    """The fastest links that join all members, fastest first (Prim's tree): (rate, member, member)."""
    n = len(links)
    rate = np.minimum(links.flow, links.flow.T)
    joined = np.zeros(n, dtype=bool)
    joined[0] = True
    best, source = rate[0].copy(), np.zeros(n, dtype=np.int64)
    joins = []
    for _ in range(n - 1):
        node = int(np.argmax(np.where(joined, -1, best)))
        joins.append((int(best[node]), int(source[node]), node))
        joined[node] = True
        faster = rate[node] > best
        best, source = np.where(faster, rate[node], best), np.where(faster, node, source)
    return sorted(joins, key=lambda join: (-join[0], join[1], join[2]))


def _regions(n: int, joins: Sequence[tuple[int, int, int]]) -> tuple[Region, ...]:
    label: Int64s = np.arange(n)
    for _, one, other in joins:
        low, high = sorted((int(label[one]), int(label[other])))
        label[label == high] = low
    return tuple(tuple(np.flatnonzero(label == each).tolist()) for each in np.unique(label))
