"""Shares: the closed form against random search, the integers against their law, and what a retry keeps."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.plan.candidates import Task, direct
from atoll.plan.chunks import chunk_table
from atoll.plan.grid import Grid
from atoll.plan.lanes import fitted_lanes, kept_lanes
from atoll.plan.links import Links, without
from atoll.plan.price import price
from atoll.plan.shares import balance, star_fractions, whole_shares
from atoll.values import Edge, Lane
from support.networks import MB, links_of, names

V = 100 * MB


def access_only(up: list[float], down: list[float] | None = None) -> Links:
    return links_of(lambda i, j: 1e12, up, down)


def everybody(links: Links) -> np.ndarray:
    return np.ones(len(links), dtype=bool)


def busiest_s(links: Links, fractions: np.ndarray, contributes: np.ndarray) -> float:
    """Of stars with these fractions, by definition: what each member sends and receives, over its lines."""
    n, num = len(links), contributes.sum()
    sent = contributes * (1 - fractions) + (n - 1) * fractions
    received = (1 - fractions) + (num - contributes) * fractions
    return float(max((sent / links.up).max(), (received / links.down).max()))


@pytest.mark.parametrize("seed", range(60))
def test_random_search_never_beats_the_closed_form(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 7))
    links = access_only(list(MB * 10 ** rng.uniform(0, 2, n)), list(MB * 10 ** rng.uniform(0, 2, n)))
    contributes = rng.random(n) < rng.choice([1.0, 0.6])
    contributes[0] = True
    fractions = star_fractions(links, range(n), contributes)
    assert fractions.sum() == pytest.approx(1.0)
    assert (fractions >= 0).all()
    ours = busiest_s(links, fractions, contributes)
    for others in rng.dirichlet(np.full(n, 0.5), size=2000):
        assert busiest_s(links, others, contributes) >= ours * (1 - 1e-6), f"seed {seed}: {others}"


def test_a_slow_member_is_no_root_and_costs_no_more_than_its_own_part() -> None:
    """One of eight at 100 Mbit/s, the others at 1 Gbit/s, 100 MB: 8 s, where equal shares take 14 s."""
    links = access_only([125 * MB] * 7 + [12.5 * MB])
    lanes = fitted_lanes(links, everybody(links))
    assert [lane.root for lane in lanes] == list(names(7))
    assert len({lane.share for lane in lanes}) == 1
    assert price(links, lanes, V, codec="int8").busy_s == pytest.approx(8.0)
    assert price(links, [Lane(m) for m in links.members], V, codec="int8").busy_s == pytest.approx(14.0)


def test_equal_members_get_shares_of_one() -> None:
    for n in (2, 3, 7, 64):
        links = access_only([10 * MB] * n)
        assert fitted_lanes(links, everybody(links)) == tuple(Lane(m) for m in names(n))


def test_shares_follow_rates() -> None:
    links = access_only([10 * MB, 20 * MB, 40 * MB, 80 * MB])
    shares = [lane.share for lane in fitted_lanes(links, everybody(links))]
    assert shares == sorted(shares)
    assert shares[-1] > 3 * shares[0]


def test_links_between_members_bound_shares_too() -> None:
    """A link to member 0 carries both its and the other's share: 0 takes none, the others a third each."""
    links = links_of(lambda i, j: MB if 0 in (i, j) else 100 * MB, [100 * MB] * 4)
    found = direct(Task(links, V, "int8", links.members))
    assert found.price.busy_s == pytest.approx(V / 3 / MB, rel=0.02)


# ---- integers --------------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12).filter(lambda f: sum(f) > 0.01),
    st.integers(1, 500),
)
def test_seats_are_handed_out_by_highest_averages(fractions: list[float], seats: int) -> None:
    given_ = whole_shares(fractions, seats)
    assert sum(given_) == seats
    total = sum(fractions)
    for held, each in zip(given_, fractions, strict=True):
        assert held >= int(each / total * seats - 1e-6) - 1 + (each == 0), (
            "a quota is never missed by more than one"
        )
        assert each > 0 or held == 0
    averages = [round(f / total * 2**40) / (held + 1) for f, held in zip(fractions, given_, strict=True)]
    paid = [round(f / total * 2**40) / held for f, held in zip(fractions, given_, strict=True) if held]
    assert max(averages) <= min(paid) * (1 + 1e-9), (
        "nobody would pay more for another seat than somebody paid"
    )


def test_even_fractions_give_ones() -> None:
    assert whole_shares([1 / 3] * 3) == [1, 1, 1]
    assert whole_shares([0.5, 0.25, 0.25]) == [2, 1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_balance_comes_near_the_best(seed: int) -> None:
    """Against the closed form, on stars; costs are what one star alone makes each line do."""
    rng = random.Random(seed)
    links = access_only([MB * 10 ** rng.uniform(0, 1) for _ in range(rng.randint(3, 6))])
    n, all_ = len(links), everybody(links)
    columns = []
    for root in range(n):
        alone = np.eye(n)[root]
        columns.append(np.concatenate([(1 - alone + (n - 1) * alone) / links.up] * 2))
    best = busiest_s(links, star_fractions(links, range(n), all_), all_)
    found = busiest_s(links, balance(np.stack(columns, axis=1)), all_)
    assert found <= 1.03 * best, f"seed {seed}: {found / best:.4f}"


# ---- retry -----------------------------------------------------------------------------------------------


def parts(lanes: tuple[Lane, ...], grid: Grid, chunk_bytes: int = 4096) -> dict[str, set[tuple[int, int]]]:
    """The chunks of every root, as element ranges."""
    table = chunk_table(grid, lanes, "int8", chunk_bytes)
    found: dict[str, set[tuple[int, int]]] = {}
    for chunk, lane in enumerate(table.lanes.tolist()):
        found.setdefault(lanes[lane].root, set()).add(
            (int(table.starts[chunk]), int(table.starts[chunk + 1]))
        )
    return found


@pytest.mark.parametrize("seed", range(40))
def test_a_retry_keeps_every_chunk_of_the_roots_that_are_left(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(3, 7)
    grid = Grid.of([rng.randint(1, 300_000) for _ in range(rng.randint(1, 5))])
    links = access_only([MB * 10 ** rng.uniform(0, 1) for _ in range(n)])
    lanes = fitted_lanes(links, everybody(links))
    while len(links) > 1:
        gone = rng.randrange(len(links))
        before = parts(lanes, grid)
        if rng.random() < 0.3:
            links = without(links, [Edge(links.members[gone], links.members[gone - 1])])
        else:
            keep = [i for i in range(len(links)) if i != gone]
            links = Links(
                tuple(links.members[i] for i in keep),
                links.rate[np.ix_(keep, keep)],
                links.up[keep],
                links.down[keep],
                links.delay_s[np.ix_(keep, keep)],
            )
        lanes = kept_lanes(lanes, links, everybody(links))
        if not lanes:
            return
        after = parts(lanes, grid)
        roots = {lane.root for lane in lanes}
        for root in set(before) & roots:
            assert before[root] <= after.get(root, set()), f"seed {seed}: {root} lost chunks"
        covered = sorted(chunk for chunks in after.values() for chunk in chunks)
        assert covered[0][0] == 0
        assert covered[-1][1] == grid.numel
        assert all(one[1] == other[0] for one, other in itertools.pairwise(covered)), f"seed {seed}"


def test_who_had_less_takes_more_of_what_a_lost_root_leaves() -> None:
    links = access_only([10 * MB] * 4)
    three = without(links, [Edge("p0000", "p0001")])
    lanes = kept_lanes(fitted_lanes(links, everybody(links)), three, everybody(three))
    assert {lane.root for lane in lanes} == {"p0002", "p0003"}
    shares = {root: sum(lane.share for lane in lanes if lane.root == root) for root in ("p0002", "p0003")}
    assert shares["p0002"] == shares["p0003"]


def test_other_trees_than_stars_are_planned_anew() -> None:
    links = access_only([10 * MB] * 3)
    assert kept_lanes([Lane("p0000", 1, (0, 0, 1), (0, 0, 1))], links, everybody(links)) == ()
    assert kept_lanes([Lane("x"), Lane("y")], links, everybody(links)) == ()
