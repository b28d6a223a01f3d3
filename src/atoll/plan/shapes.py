"""The shape of a lane as arrays, for pricing many of them: parents, depth, and the links that it uses.

Nodes are indices into the plan's members (sorted by id). `up[i]` is where member i sends, `down[i]` whom it hears
from; the root's are its own. A star has neither list: all is between the root and everybody else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.plan.grid import Int64s
from atoll.values import Edge, Lane


@dataclass(frozen=True)
class Tree:
    """One lane's two trees over `len(up)` nodes."""

    root: int
    up: Int64s
    down: Int64s

    @staticmethod
    def of(lane: Lane, members: Sequence[str]) -> Tree:
        """ValueError if the lane is no tree over these members."""
        if lane.root not in members:
            raise ValueError(f"the root {lane.root!r} is no member")
        root = list(members).index(lane.root)
        return Tree(root, _parents(lane.up, root, len(members)), _parents(lane.down, root, len(members)))

    @property
    def height(self) -> int:
        """The most hops from a member to the root."""
        return int(hops(self.up).max())

    def lane(self, members: Sequence[str], share: int = 1) -> Lane:
        """As a value; a star needs no lists."""
        if (self.up == self.root).all() and (self.down == self.root).all():
            return Lane(members[self.root], share)
        return Lane(members[self.root], share, tuple(self.up.tolist()), tuple(self.down.tolist()))


def star(root: int, num_nodes: int) -> Tree:
    parents = np.full(num_nodes, root, dtype=np.int64)
    return Tree(root, parents, parents)


def re_encodings(tree: Tree) -> int:
    """How often a partial sum is encoded on its way to the root; a star does it never."""
    return max(0, tree.height - 1)


def hops(parents: Int64s) -> Int64s:
    """How many links lie between each node and the root; pointers are doubled, so that long chains are cheap."""
    total, reach = (parents != np.arange(len(parents))).astype(np.int64), parents
    for _ in range(len(parents).bit_length()):
        total, reach = total + total[reach], reach[reach]
    return total


def sends(tree: Tree, contributes: np.ndarray) -> np.ndarray:
    """Which nodes have something to send up: contributors, and those with a contributor below them."""
    has = contributes.copy()
    if not has.all():
        for node in np.argsort(-hops(tree.up), kind="stable").tolist():
            has[tree.up[node]] |= has[node]
    has[tree.root] = False
    return has


def used_links(lanes: Sequence[Lane], members: Sequence[str]) -> set[Edge]:
    """Every directed link that these lanes send data over, whoever contributes."""
    used = set()
    for lane in lanes:
        tree = Tree.of(lane, members)
        for node, member in enumerate(members):
            if node != tree.root:
                used.add(Edge(member, members[tree.up[node]]))
                used.add(Edge(members[tree.down[node]], member))
    return used


def avoids(lanes: Sequence[Lane], members: Sequence[str], broken: Collection[Edge]) -> bool:
    """Whether no lane uses a broken link, nor the other direction of one."""
    pairs = {frozenset((edge.source, edge.target)) for edge in broken}
    return not any(frozenset((e.source, e.target)) in pairs for e in used_links(lanes, members))


def _parents(given: Sequence[int], root: int, num_nodes: int) -> Int64s:
    if not given:
        return np.full(num_nodes, root, dtype=np.int64)
    parents = np.asarray(given, dtype=np.int64)
    if len(parents) != num_nodes or parents.min() < 0 or parents.max() >= num_nodes or parents[root] != root:
        raise ValueError(f"{len(parents)} parents for {num_nodes} members with root {root}: {tuple(given)}")
    reach = parents
    for _ in range(num_nodes.bit_length()):
        reach = reach[reach]
    if (reach != root).any():
        raise ValueError(f"not all members lead to root {root}: {tuple(given)}")
    return parents
