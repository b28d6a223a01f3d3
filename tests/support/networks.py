"""Made-up networks for tests of the planner, and slow, obvious versions of what it computes."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from atoll.plan.links import Links
from atoll.values import Lane, LinkRate

MB = 1_000_000


def names(count: int) -> tuple[str, ...]:
    return tuple(f"p{i:04d}" for i in range(count))


def links_of(
    rate: Callable[[int, int], float],
    up: list[float],
    down: list[float] | None = None,
    delay_s: float | Callable[[int, int], float] = 0.0,
) -> Links:
    """Links by a function of the members' indices; rates in bytes per second."""
    n = len(up)
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    rates, delays = np.zeros((n, n), dtype=np.int64), np.zeros((n, n))
    for i, j in pairs:
        rates[i, j] = round(rate(i, j))
        delays[i, j] = delay_s(i, j) if callable(delay_s) else delay_s
    ups = np.asarray(up, dtype=np.int64)
    downs = ups if down is None else np.asarray(down, dtype=np.int64)
    return Links(names(n), rates, ups, downs, delays)


def random_links(rng: random.Random, count: int, unusable: float = 0.0) -> Links:
    """Rates over two decades; each pair is unusable with this probability."""
    cut = {frozenset(pair) for pair in _pairs(count) if rng.random() < unusable}
    return links_of(
        lambda i, j: 0 if frozenset((i, j)) in cut else MB * 10 ** rng.uniform(0, 2),
        [MB * 10 ** rng.uniform(0, 2) for _ in range(count)],
        [MB * 10 ** rng.uniform(0, 2) for _ in range(count)],
        lambda i, j: rng.uniform(0.0, 0.1),
    )


def seen(links: Links) -> tuple[LinkRate, ...]:
    """What engines would report of these links if each were measured alone."""
    members, reports = links.members, []
    for i, one in enumerate(members):
        reports += [LinkRate(one, "", float(links.up[i])), LinkRate("", one, float(links.down[i]))]
        for j, other in enumerate(members):
            if i != j and links.rate[i, j]:
                trip_s = float(links.delay_s[i, j] + links.delay_s[j, i])
                reports.append(LinkRate(one, other, float(links.flow[i, j]), trip_s))
    return tuple(reports)


def random_tree(rng: random.Random, members: tuple[str, ...], share: int = 1) -> Lane:
    root = rng.randrange(len(members))
    up, down = (_random_parents(rng, root, len(members)) for _ in range(2))
    return Lane(members[root], share, up, down)


def _random_parents(rng: random.Random, root: int, count: int) -> tuple[int, ...]:
    parents, placed = [root] * count, [root]
    for node in rng.sample([i for i in range(count) if i != root], count - 1):
        parents[node] = rng.choice(placed)
        placed.append(node)
    return tuple(parents)


def slow_moved(
    lanes: list[Lane], members: tuple[str, ...], contributors: set[str], wire_bytes: float
) -> np.ndarray:
    """Bytes over each link, walked one contributor and one member at a time."""
    moved, total = np.zeros((len(members), len(members))), sum(lane.share for lane in lanes)
    for lane in lanes:
        root = members.index(lane.root)
        up = lane.up or (root,) * len(members)
        down = lane.down or (root,) * len(members)
        used_up = set()
        for contributor in contributors:
            node = members.index(contributor)
            while node != root:
                used_up.add((node, up[node]))
                node = up[node]
        used_down = {(down[i], i) for i in range(len(members)) if i != root}
        for i, j in [*used_up, *used_down]:
            moved[i, j] += wire_bytes * lane.share / total
    return moved


def _pairs(count: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(count) for j in range(i)]
