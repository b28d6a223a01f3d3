"""Which trees carry a round. Version 1 knows *direct*: every member is the root of a star for its share."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from atoll.values import Edge, Lane


def direct_lanes(members: Sequence[str], broken: Collection[Edge]) -> tuple[Lane, ...]:
    """Stars with equal shares, rooted at every member that can reach all others both ways; empty if none can."""
    cut = {edge.source for edge in broken} | {edge.target for edge in broken}
    if len(members) > 1 and cut:
        pairs = {frozenset((edge.source, edge.target)) for edge in broken}
        roots = [
            m for m in members if not any(frozenset((m, other)) in pairs for other in members if other != m)
        ]
    else:
        roots = list(members)
    return tuple(Lane(root=root) for root in roots)


def cover_broken(members: Sequence[str], broken: Collection[Edge]) -> frozenset[str]:
    """The smallest set of members to drop so that a direct root remains; ties go to the youngest (last in `members`).

    `members` is ordered from oldest to youngest. Dropping is only asked for when no lane avoids the broken edges.
    """
    dropped: set[str] = set()
    while len(members) - len(dropped) > 1:
        left = [m for m in members if m not in dropped]
        if direct_lanes(left, broken):
            return frozenset(dropped)
        degree = {m: sum(m in (edge.source, edge.target) for edge in _pairs(left, broken)) for m in left}
        dropped.add(max(left, key=lambda m: (degree[m], left.index(m))))
    return frozenset(dropped)


def _pairs(members: Sequence[str], broken: Collection[Edge]) -> set[Edge]:
    inside = set(members)
    return {
        Edge(min(e.source, e.target), max(e.source, e.target))
        for e in broken
        if e.source in inside and e.target in inside
    }
