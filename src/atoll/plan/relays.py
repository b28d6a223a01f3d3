"""Lanes for members that do not all reach each other: members in between pass sums up and finished bytes down.

Where A and B reach only C, nothing goes from A to B: in a lane with root A, B sends to C, and C sends A the sum. The
trees go by the fewest hops, since every hop is a delay and an encoding, then by the fastest link.
"""

from __future__ import annotations

import numpy as np

from atoll.plan.grid import Int64s
from atoll.plan.links import Links
from atoll.plan.shapes import Tree

MOST_ROOTS = 64


def relay_trees(links: Links, most_hops: int | None = None) -> list[Tree]:
    """One tree for every root (at most MOST_ROOTS) that reaches all members within `most_hops`; [] if there is none."""
    trees: list[Tree] = []
    for root in range(0, len(links), -(-len(links) // MOST_ROOTS)):
        depth = distances(links.usable, root)
        if (depth >= 0).all() and (most_hops is None or depth.max() <= most_hops):
            parents = _parents(links, depth)
            trees.append(Tree(root, parents, parents))
    return trees


def distances(usable: np.ndarray, root: int) -> Int64s:
    """Hops from the root over usable links; -1 for whom it does not reach."""
    depth = np.full(len(usable), -1, dtype=np.int64)
    depth[root], reached, hop = 0, np.zeros(len(usable), dtype=bool), 0
    reached[root] = True
    edge = reached.copy()
    while edge.any():
        hop += 1
        edge = usable[edge].any(axis=0) & ~reached
        depth[edge] = hop
        reached |= edge
    return depth


def _parents(links: Links, depth: Int64s) -> Int64s:
    """Each node's parent is one hop nearer the root, over the fastest link, less for every child it has already."""
    rate = np.minimum(links.flow, links.flow.T)
    parents = np.full(len(links), int(np.argmin(depth)), dtype=np.int64)
    children = np.zeros(len(links), dtype=np.int64)
    for node in np.flatnonzero(depth > 0).tolist():
        nearer = np.flatnonzero(links.usable[node] & (depth == depth[node] - 1))
        parents[node] = nearer[int(np.argmax(rate[node, nearer] // (1 + children[nearer])))]
        children[parents[node]] += 1
    return parents


def whom_to_drop(usable: np.ndarray, most_hops: int | None) -> frozenset[int]:
    """The fewest nodes (indices from oldest to youngest) whose leaving lets some root reach all others within
    `most_hops`; ties go to the youngest.
    """
    n = len(usable)
    limit = n if most_hops is None else most_hops
    best, size = np.zeros(n, dtype=bool), 0
    for root in range(n):
        depth = distances(usable, root)
        within = (depth >= 0) & (depth <= limit)
        if (int(within.sum()), within.tolist()) > (size, best.tolist()):
            best, size = within, int(within.sum())
        if size == n:
            break
    return frozenset(np.flatnonzero(~best).tolist())
