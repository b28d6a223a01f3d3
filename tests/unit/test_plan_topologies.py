"""Ring orders against brute force, regions, and trees for members that do not all reach each other."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from atoll.plan.candidates import BUILDERS, Task
from atoll.plan.regions import region_cuts, two_level
from atoll.plan.relays import relay_trees, whom_to_drop
from atoll.plan.ring import UNUSABLE, chains, hop_costs, ring_order, worst_hop
from atoll.plan.shapes import Tree, avoids, hops
from atoll.values import Edge
from support.networks import MB, links_of, names, random_links

V = 100 * MB


def random_costs(rng: random.Random, n: int, unusable: float = 0.0) -> np.ndarray:
    costs = np.asarray([[rng.randint(1, 30) for _ in range(n)] for _ in range(n)], dtype=np.int64)
    for i, j in itertools.permutations(range(n), 2):
        if rng.random() < unusable:
            costs[i, j] = UNUSABLE
    np.fill_diagonal(costs, UNUSABLE)
    return costs


@pytest.mark.parametrize("seed", range(40))
def test_no_permutation_beats_the_ring(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(3, 7)
    costs = random_costs(rng, n, rng.choice((0.0, 0.3, 0.6)))
    orders = [[0, *rest] for rest in itertools.permutations(range(1, n))]
    best = min(worst_hop(costs, order) for order in orders)
    found = ring_order(costs)
    if best == UNUSABLE:
        assert found == [], f"seed {seed}"
        return
    assert sorted(found) == list(range(n))
    assert worst_hop(costs, found) == best, f"seed {seed}"
    shortest = min(_length(costs, order) for order in orders if worst_hop(costs, order) == best)
    assert _length(costs, found) == shortest, f"seed {seed}: of equally good rings the shortest"


@pytest.mark.parametrize("n", [12, 16])
def test_exact_rings_of_many_beat_what_exchanges_find(n: int) -> None:
    from atoll.plan.ring import _improved

    costs = random_costs(random.Random(n), n)
    assert worst_hop(costs, ring_order(costs)) <= worst_hop(costs, _improved(costs))


@pytest.mark.parametrize("seed", range(8))
def test_exchanges_come_near_the_exact_ring(seed: int) -> None:
    from atoll.plan.ring import _improved

    costs = random_costs(random.Random(seed), 10)
    tour = _improved(costs)
    assert sorted(tour) == list(range(10))
    exact, found = worst_hop(costs, ring_order(costs)), worst_hop(costs, tour)
    assert found <= max(2 * exact, exact + 6), f"seed {seed}: {found}, {exact} is possible"


def test_two_sites_are_crossed_once_each_way() -> None:
    links = links_of(lambda i, j: 1250 * MB if i % 2 == j % 2 else 25 * MB, [1250 * MB] * 8)
    order = ring_order(hop_costs(links, V))
    assert sum(i % 2 != j % 2 for i, j in zip(order, [*order[1:], order[0]], strict=True)) == 2


@pytest.mark.parametrize("n", [2, 3, 6])
def test_chains_end_in_each_root_and_lead_back(n: int) -> None:
    order = random.Random(n).sample(range(n), n)
    for root, tree in enumerate(chains(order)):
        assert tree.root == root
        assert sorted(hops(tree.up).tolist()) == list(range(n))
        last = order[order.index(root) - 1]
        assert hops(tree.down)[last] == n - 1, "the finished bytes go around the same way"


# ---- regions ---------------------------------------------------------------------------------------------


def test_regions_come_from_the_rates() -> None:
    region = [0, 1, 0, 2, 1, 0, 2]
    links = links_of(lambda i, j: 100 * MB if region[i] == region[j] else 3 * MB, [1e9] * 7)
    assert region_cuts(links)[0] == ((0, 2, 5), (1, 4), (3, 6))


def test_no_regions_where_links_are_alike() -> None:
    rng = random.Random(1)
    links = links_of(lambda i, j: rng.uniform(60, 100) * MB, [1e9] * 6)
    assert region_cuts(links) == []
    assert BUILDERS["two-level"](Task(links, V, "int8", links.members)).why_not


def test_one_copy_crosses_and_every_link_between_regions_has_its_part() -> None:
    links = links_of(lambda i, j: 100 * MB if i // 3 == j // 3 else 4 * MB, [1e9] * 6)
    trees = two_level(region_cuts(links)[0], links)
    assert all(_crossings(tree, 3) == 1 for tree in trees)
    crossed = {(min(i, p), max(i, p)) for t in trees for i, p in enumerate(t.up.tolist()) if i // 3 != p // 3}
    assert len(crossed) == 9
    found = BUILDERS["two-level"](Task(links, V, "int8", links.members))
    assert found.price.busy_s == pytest.approx(V / (9 * 4 * MB), rel=0.03), (
        "V crosses each way, over nine links"
    )
    assert BUILDERS["direct"](Task(links, V, "int8", links.members)).price.busy_s > 2.5 * found.price.busy_s


# ---- relays ----------------------------------------------------------------------------------------------


def test_two_that_reach_only_a_third() -> None:
    links = links_of(lambda i, j: 0 if {i, j} == {0, 1} else 10 * MB, [10 * MB] * 3)
    trees = relay_trees(links)
    assert [tree.root for tree in trees] == [0, 1, 2]
    assert trees[0].up.tolist() == [0, 2, 0]
    assert all(avoids([tree.lane(links.members)], links.members, {Edge("p0000", "p0001")}) for tree in trees)


def test_a_line_of_members_needs_relays() -> None:
    links = links_of(lambda i, j: 10 * MB if abs(i - j) == 1 else 0, [10 * MB] * 4)
    task = Task(links, V, "int8", links.members)
    assert not BUILDERS["direct"](task).lanes
    assert BUILDERS["relay"](task).price.seconds < float("inf")
    assert relay_trees(links, most_hops=1) == []
    assert [tree.root for tree in relay_trees(links, most_hops=2)] == [1, 2]


@pytest.mark.parametrize("seed", range(60))
def test_nobody_is_dropped_without_need_and_the_youngest_first(seed: int) -> None:
    """Against all subsets. A set can be served if one of its members reaches the others within the hops."""
    rng = random.Random(seed)
    n, most = rng.randint(2, 7), rng.choice((1, 2, None))
    usable = np.zeros((n, n), dtype=bool)
    for i, j in itertools.combinations(range(n), 2):
        usable[i, j] = usable[j, i] = rng.random() < rng.choice((0.2, 0.5, 0.8))
    dropped = whom_to_drop(usable, most)
    kept = [i for i in range(n) if i not in dropped]
    assert _served(usable, kept, most), f"seed {seed}"
    subsets = itertools.chain.from_iterable(
        itertools.combinations(range(n), size) for size in range(1, n + 1)
    )
    able = [list(each) for each in subsets if _served(usable, each, most)]
    largest = max(len(each) for each in able)
    assert len(kept) == largest, f"seed {seed}"
    assert kept == min(each for each in able if len(each) == largest), f"seed {seed}: ties go to the youngest"


@pytest.mark.parametrize("seed", range(40))
def test_no_candidate_uses_what_is_not_there(seed: int) -> None:
    rng = random.Random(seed)
    links = random_links(rng, rng.randint(3, 8), unusable=0.3)
    pairs = itertools.permutations(range(len(links)), 2)
    cut = {Edge(links.members[i], links.members[j]) for i, j in pairs if not links.usable[i, j]}
    for name, build in BUILDERS.items():
        lanes = build(Task(links, V, "int8", links.members)).lanes
        assert avoids(lanes, links.members, cut), f"seed {seed}: {name}"


def _length(costs: np.ndarray, order: list[int]) -> int:
    return sum(int(costs[i, j]) for i, j in zip(order, [*order[1:], order[0]], strict=True))


def _crossings(tree: Tree, size: int) -> int:
    return sum(i // size != p // size for i, p in enumerate(tree.up.tolist()))


def _served(usable: np.ndarray, kept: object, most: int | None) -> bool:
    nodes = list(kept)  # type: ignore[call-overload]
    inside = usable[np.ix_(nodes, nodes)]
    reach = np.eye(len(nodes), dtype=bool)
    for _ in range(len(nodes) if most is None else most):
        reach |= reach @ inside
    return bool(reach.all(axis=1).any())


def test_names_sort_like_their_numbers() -> None:
    assert list(names(12)) == sorted(names(12))
