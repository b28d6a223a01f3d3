"""Any set of trees gives the same bits on every member, and those of the formula computed in one process."""

from __future__ import annotations

import random

import numpy as np
import pytest
from msgspec.structs import replace

from atoll.comm.trees import reduce_here
from atoll.plan.grid import Grid
from atoll.plan.trees import way_up
from atoll.values import Contribution, Lane, OpId
from support.engines import Engines, decoded, encoded, power_of
from support.trees import random_lanes, ring_lanes, two_level_lanes


def values_for(world: int, numel: int, seed: int) -> dict[str, np.ndarray]:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    return {f"p{i:02d}": rng.standard_normal(numel).astype(np.float32) for i in range(world)}


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("seed", range(6))
def test_random_trees_equal_the_formula_to_the_bit(codec: str, seed: int) -> None:
    rng = random.Random(seed)
    world = rng.randrange(2, 8)
    grid = Grid.of([rng.randrange(1, 40_000) for _ in range(3)])
    values = values_for(world, grid.numel, seed)
    with Engines(values) as engines:
        for attempt in range(4):
            plan = engines.plan(grid, codec, OpId(1, attempt))
            contributors = rng.sample(plan.members, rng.randrange(1, world + 1))
            plan = replace(
                plan,
                lanes=random_lanes(plan.members, rng),
                contributions=tuple(Contribution(peer, rng.randrange(1, 9)) for peer in sorted(contributors)),
                chunk_bytes=rng.choice([3000, 20_000, 1 << 20]),
            )
            expected = reduce_here(
                plan, grid, {peer: encoded(grid, codec, values[peer]) for peer in contributors}
            )
            assert expected is not None
            for result in engines.reduce(plan, grid, values):
                np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_a_ring_gives_the_mean(world: int) -> None:
    grid = Grid.of([70_000])
    values = {f"p{i:02d}": np.full(grid.numel, power_of(i), np.float32) for i in range(world)}
    with Engines(values) as engines:
        plan = engines.plan(grid, "fp32", OpId(1, 0))
        plan = replace(plan, lanes=ring_lanes(plan.members), chunk_bytes=20_000)
        for result in engines.reduce(plan, grid, values):
            np.testing.assert_allclose(
                decoded(grid, "fp32", result), (power_of(world) - 1) / world, rtol=1e-6
            )


def test_a_ring_sends_each_link_what_the_formula_says() -> None:
    """2 V (N-1) / N bytes out of every member, whatever the topology, and all of it to its one neighbour."""
    grid, world = Grid.of([1_000_000]), 4
    values = values_for(world, grid.numel, 1)
    with Engines(values) as engines:
        warm = engines.plan(grid, "int8", OpId(1, 0))
        ring = replace(warm, lanes=ring_lanes(warm.members))
        engines.reduce(ring, grid, values)
        again = replace(ring, op=OpId(1, 1))
        reports = [one.report() for one in engines.begin(again, grid, values).values()]
        formula = 2 * grid.wire_bytes("int8") * (world - 1) / world
        for report in reports:
            assert report.ok
            assert report.stats.sent_bytes == pytest.approx(formula, rel=0.01)


def test_two_levels_cross_the_thin_link_once() -> None:
    regions = [(0, 2, 4), (1, 3, 5, 6)]
    grid = Grid.of([90_000])
    values = values_for(7, grid.numel, 2)
    with Engines(values) as engines:
        plan = engines.plan(grid, "int8", OpId(1, 0))
        plan = replace(plan, lanes=two_level_lanes(plan.members, regions), chunk_bytes=9000)
        for lane in plan.lanes:
            crossings = [
                (member, parent)
                for member, parent in enumerate(lane.up)
                if (member in regions[0]) != (parent in regions[0])
            ]
            assert len(crossings) == 1
        expected = reduce_here(plan, grid, {p: encoded(grid, "int8", v) for p, v in values.items()})
        for result in engines.reduce(plan, grid, values):
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("shape", ["star", "ring", "two-level"])
def test_sixty_four_members(shape: str) -> None:
    grid, world = Grid.of([64 * 256]), 64
    values = {f"p{i:02d}": np.full(grid.numel, float(i), np.float32) for i in range(world)}
    with Engines(values, num_workers=1) as engines:
        plan = engines.plan(grid, "fp32", OpId(1, 0), deadline_s=60.0)
        regions = [range(20), range(20, 64)]
        lanes = {
            "star": plan.lanes,
            "ring": ring_lanes(plan.members),
            "two-level": two_level_lanes(plan.members, regions),
        }
        for result in engines.reduce(replace(plan, lanes=lanes[shape]), grid, values):
            np.testing.assert_allclose(decoded(grid, "fp32", result), (world - 1) / 2, rtol=1e-5)


def test_a_member_without_an_update_passes_on_what_it_gets() -> None:
    """a -> b -> c: b contributes nothing, and a's bytes come to c unchanged."""
    members = ("a", "b", "c")
    lane = Lane("c", up=(1, 2, 2), down=(1, 2, 2))
    contributions = (Contribution("a", 3), Contribution("c", 1))
    way = way_up(lane, members, contributions)
    assert [[(each.member, each.weight) for each in inputs] for inputs in way.inputs] == [
        [(0, 3)],
        [(0, 3)],
        [(1, 3), (2, 1)],
    ]
    grid = Grid.of([5000])
    values = {
        peer: np.full(5000, value, np.float32) for peer, value in zip(members, (4.0, 9.0, 8.0), strict=True)
    }
    with Engines(values) as engines:
        plan = replace(engines.plan(grid, "fp32", OpId(1, 0)), lanes=(lane,), contributions=contributions)
        for result in engines.reduce(plan, grid, values):
            np.testing.assert_array_equal(decoded(grid, "fp32", result), np.float32(5.0))


@pytest.mark.parametrize(
    ("lane", "complaint"),
    [
        (Lane("b", up=(2, 1, 0), down=(1, 1, 1)), "does not lead"),
        (Lane("b", up=(1, 1), down=(1, 1)), "parents"),
        (Lane("b", up=(1, 1, -1), down=(1, 1, 1)), "not on the way up"),
        (Lane("x"), "not among the members"),
    ],
)
def test_a_lane_that_leads_nowhere_is_refused_in_one_line(lane: Lane, complaint: str) -> None:
    grid = Grid.of([5000])
    values = values_for(3, 5000, 3)
    with Engines(values) as engines:
        names = dict(zip("abc", values, strict=True))
        lane = replace(lane, root=names.get(lane.root, "x"))
        plan = replace(engines.plan(grid, "fp32", OpId(1, 0)), lanes=(lane,))
        for one in engines.begin(plan, grid, values).values():
            report = one.report()
            assert not report.ok
            assert complaint in report.reason
            assert "\n" not in report.reason
