"""The bytes of a plan: against closed forms, against a walk over every chunk and hop, and in no time."""

from __future__ import annotations

import random

import pytest

from atoll.plan.candidates import BUILDERS, Task
from atoll.plan.chunks import chunk_table
from atoll.plan.grid import Grid
from atoll.plan.traffic import FRAME_BYTES, Traffic, traffic, traffic_by_route
from atoll.plan.trees import parents_of, way_up
from atoll.values import Contribution, Lane
from support.networks import names, random_links


def walked(
    lanes: list[Lane],
    members: list[str],
    grid: Grid,
    codec: str,
    chunk_bytes: int,
    contributors: list[str],
    routes: tuple[int, ...] = (),
) -> dict[str, Traffic]:
    """The same, chunk by chunk and hop by hop."""
    table = chunk_table(grid, lanes, codec, chunk_bytes, routes)
    sent, received, held = (dict.fromkeys(members, 0) for _ in range(3))
    for chunk, lane_index in enumerate(table.lanes.tolist()):
        lane, size = lanes[lane_index], int(table.offsets[chunk + 1] - table.offsets[chunk])
        up, down = parents_of(lane, members)
        root = members.index(lane.root)
        ways = way_up(lane, members, [Contribution(peer, 1) for peer in contributors])
        hops = [(m, up[m]) for m, inputs in enumerate(ways.inputs) if inputs and m != root]
        hops += [(down[m], m) for m in range(len(members)) if m != root]
        for source, target in hops:
            sent[members[source]] += size + FRAME_BYTES
            received[members[target]] += size + FRAME_BYTES
            sent[members[target]] += FRAME_BYTES
            received[members[source]] += FRAME_BYTES
        for m, inputs in enumerate(ways.inputs):
            others = sum(each.member != m for each in inputs)
            held[members[m]] += size * (others + (len(inputs) > 1 and m != root))
    return {member: Traffic(sent[member], received[member], held[member]) for member in members}


@pytest.mark.parametrize("count", [2, 3, 8])
def test_equal_stars_move_what_algebra_says(count: int) -> None:
    """Each sends its update but for its own share, and its finished share to all others: 2 V (N - 1) / N."""
    grid = Grid.of([count * 256 * 64])
    members = names(count)
    of = traffic([Lane(member) for member in members], members, grid, "int8", chunk_bytes=1 << 14)
    share = grid.wire_bytes("int8") // count
    for each in of.values():
        assert each.held_bytes == (count - 1) * share
        assert each.sent_bytes == pytest.approx(2 * (count - 1) * share, rel=0.02)
        assert each.sent_bytes > 2 * (count - 1) * share
        assert each.received_bytes == each.sent_bytes


@pytest.mark.parametrize("topology", ["direct", "ring", "two-level", "relay"])
@pytest.mark.parametrize("seed", range(5))
def test_every_topology_moves_what_a_walk_counts(topology: str, seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(3, 7)
    links = random_links(chance, count)
    members = list(links.members)
    contributors = sorted(chance.sample(members, chance.randint(1, count)))
    grid = Grid.of([chance.randint(1, 5000) for _ in range(6)])
    task = Task(links, grid.wire_bytes("int8"), "int8", tuple(contributors))
    lanes = list(BUILDERS[topology](task).lanes)
    if not lanes:
        assert topology == "two-level", f"seed {seed}: any links can be had"
        pytest.skip(f"seed {seed}: no regions in these links")
    found = traffic(lanes, members, grid, "int8", chunk_bytes=4096, contributors=contributors)
    assert found == walked(lanes, members, grid, "int8", 4096, contributors), f"seed {seed}"
    routes = (0, *sorted(chance.sample(grid.boundaries[1:-1].tolist(), 2)), grid.numel)
    routed = traffic(lanes, members, grid, "int8", chunk_bytes=4096, contributors=contributors, routes=routes)
    assert routed == walked(lanes, members, grid, "int8", 4096, contributors, routes), f"seed {seed}"
    parts = traffic_by_route(
        lanes, members, grid, "int8", chunk_bytes=4096, contributors=contributors, routes=routes
    )
    assert len(parts) == 3
    assert all(sum((each[m] for each in parts), Traffic()) == routed[m] for m in members)
    assert sum(each.sent_bytes for each in found.values()) == sum(
        each.received_bytes for each in found.values()
    )


def test_one_member_moves_nothing() -> None:
    assert traffic([Lane("a")], ["a"], Grid.of([1000]), "fp32") == {"a": Traffic()}


def test_a_thousand_members_are_no_wait() -> None:
    members = names(1000)
    of = traffic([Lane(member) for member in members], members, Grid.of([1 << 22]), "int8")
    assert len(of) == 1000
