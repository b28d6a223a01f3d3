"""The ring: every member is the end of one chain around it, so that a link carries to one neighbour only.

Lane k collects along the ring to root k and hands the finished bytes on from there, the same way around. What counts
is the worst hop, so the order is a bottleneck travelling-salesman tour: exact up to EXACT members (bisection over
the hops' costs, and the sets of members that a path can cover), beyond by exchanging parts of a tour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from atoll.plan.grid import Int64s
from atoll.plan.links import Links
from atoll.plan.shapes import Tree

EXACT = 16
UNUSABLE = np.iinfo(np.int64).max
_FAR = 1 << 60  # two of it can be added
_EXCHANGES = 64


def hop_costs(links: Links, wire_bytes: int) -> Int64s:
    """Nanoseconds of one hop of the ring: an even part of the vector, and the delay; UNUSABLE where there is none."""
    n = len(links)
    flow = np.maximum(links.flow, 1)
    cost_ns = np.round((wire_bytes / n / flow + links.delay_s) * 1e9).astype(np.int64)
    return np.where(links.usable, cost_ns, UNUSABLE)


def ring_order(costs: Int64s) -> list[int]:
    """The members in the order of a ring whose worst hop `costs[i, j]` is least; [] if there is no ring at all."""
    n = len(costs)
    if n < 3:
        usable = n < 2 or max(costs[0, 1], costs[1, 0]) < UNUSABLE
        return list(range(n)) if usable else []
    return _exact(costs) if n <= EXACT else _improved(costs)


def worst_hop(costs: Int64s, order: Sequence[int]) -> int:
    return max(int(costs[i, j]) for i, j in zip(order, [*order[1:], order[0]], strict=True))


def chains(order: Sequence[int]) -> list[Tree]:
    """One chain per member, in the order of the roots' indices."""
    n = len(order)
    after, before = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    after[list(order)] = [*order[1:], order[0]]
    before[list(order)] = [order[-1], *order[:-1]]
    trees = []
    for root in range(n):
        up, down = after.copy(), before.copy()
        up[root] = down[root] = root
        trees.append(Tree(root, up, down))
    return trees


# ---- exact -----------------------------------------------------------------------------------------------


def _exact(costs: Int64s) -> list[int]:
    """The least limit on hops that leaves a ring, then the shortest ring within it."""
    values = np.unique(costs[costs < UNUSABLE])
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if _has_ring(costs <= values[middle]):
            high = middle
        else:
            low = middle + 1
    return _shortest(np.where(costs <= values[low], costs, _FAR)) if low < len(values) else []


def _has_ring(allowed: np.ndarray) -> bool:
    """`ends[s]` are the members (bits) at which a path over the allowed hops can end that covers set s, from 0."""
    n = len(allowed)
    into = [sum(1 << i for i in range(n) if i != j and allowed[i, j]) for j in range(n)]
    ends = np.zeros(1 << n, dtype=np.int64)
    ends[1] = 1
    for sets in _sets_by_size(n):
        for j in range(1, n):
            before = sets[((sets >> j) & 1 == 0) & (ends[sets] & into[j] != 0)]
            ends[before | (1 << j)] |= 1 << j
    return bool(int(ends[-1]) & into[0])


def _shortest(costs: Int64s) -> list[int]:
    """`length[s, i]` of the shortest path from 0 over set s to i; the ring is read off from its end."""
    n = len(costs)
    length = np.full((1 << n, n), _FAR)
    length[1, 0] = 0
    for sets in _sets_by_size(n):
        for j in range(1, n):
            before = sets[(sets >> j) & 1 == 0]
            length[before | (1 << j), j] = np.minimum(
                (length[before] + costs[:, j]).min(axis=1, initial=_FAR), _FAR
            )
    covered, tour = (1 << n) - 1, [0]
    for _ in range(n - 1):
        last = int(np.argmin(length[covered] + costs[:, tour[-1]]))
        tour.append(last)
        covered ^= 1 << last
    return [0, *tour[:0:-1]]


def _sets_by_size(n: int) -> Iterator[Int64s]:
    """All sets of members that hold member 0 and lack at least one, smaller ones first."""
    sets = np.arange(1, 1 << n, 2, dtype=np.int64)
    sizes = sum(((sets >> i) & 1 for i in range(n)), start=np.zeros_like(sets))
    for size in range(1, n):
        yield sets[sizes == size]


# ---- heuristic -------------------------------------------------------------------------------------------


def _improved(costs: Int64s) -> list[int]:
    """The nearest next, from member 0; then the worst hop is exchanged away while that helps."""
    tour = _nearest(costs)
    for _ in range(_EXCHANGES):
        worst = int(np.argmax(costs[tour, np.roll(tour, -1)]))
        tour = np.roll(tour, -worst - 1)  # the worst hop leads from the last to the first
        better = _reversed_part(costs, tour)
        if better is None:
            better = _swapped_parts(costs, tour)
        if better is None:
            break
        tour = better
    return [int(i) for i in tour] if worst_hop(costs, tour.tolist()) < UNUSABLE else []


def _nearest(costs: Int64s) -> Int64s:
    free = np.ones(len(costs), dtype=bool)
    tour = np.zeros(len(costs), dtype=np.int64)
    free[0] = False
    for position in range(1, len(costs)):
        row = np.where(free, costs[tour[position - 1]], UNUSABLE)
        node = int(np.argmin(row)) if row.min() < UNUSABLE else int(np.argmax(free))
        tour[position] = node
        free[node] = False
    return tour


def _reversed_part(costs: Int64s, tour: Int64s) -> Int64s | None:
    """2-opt: the first k + 1 members the other way around, if all hops that changes are better than the worst."""
    worst = costs[tour[-1], tour[0]]
    inner = np.maximum.accumulate(costs[tour[1:-1], tour[:-2]])  # of the first k + 1, reversed
    ends = np.maximum(costs[tour[-1], tour[1:-1]], costs[tour[0], tour[2:]])
    found = np.maximum(inner, ends)
    k = int(np.argmin(found)) + 1
    if found[k - 1] >= worst:
        return None
    return np.concatenate([tour[k::-1], tour[k + 1 :]])


def _swapped_parts(costs: Int64s, tour: Int64s) -> Int64s | None:
    """3-opt: A B rest becomes B A rest, which keeps every direction."""
    n, worst = len(tour), costs[tour[-1], tour[0]]
    begin = costs[tour[-1], tour[1:-1]]  # last -> B, by where A ends
    joint = costs[tour[1:-1], tour[0]]  # B -> A, by where B ends
    end = costs[np.ix_(tour[: n - 2], tour[2:])]  # A -> rest: A ends at i, the rest begins at j + 1
    found = np.maximum(np.maximum(begin[:, None], joint[None, :]), end)
    found[np.tril_indices(n - 2, -1)] = UNUSABLE  # B has at least one member
    i, j = np.unravel_index(int(np.argmin(found)), found.shape)
    if found[i, j] >= worst:
        return None
    a, b = int(i) + 1, int(j) + 2  # A = [0, a), B = [a, b)
    return np.concatenate([tour[a:b], tour[:a], tour[b:]])
