"""Above CROWD members only lines are spoken of: for the same network the lanes and prices are those of few members."""

from __future__ import annotations

import heapq
import random
from fractions import Fraction

import numpy as np
import pytest
from msgspec.structs import replace

from atoll.comm.native import _links
from atoll.plan.candidates import Task, candidate, direct
from atoll.plan.connections import connections
from atoll.plan.crowd import CrowdTask, crowd_candidate, crowd_connections, crowd_direct
from atoll.plan.links import CROWD, Lines, measured_lines
from atoll.plan.planner import choose
from atoll.plan.price import loads
from atoll.plan.shares import whole_shares
from atoll.values import Edge, Lane, LinkRate, NodeId, OpId, Plan, PlanRequest
from support.networks import MB, links_of, names

V = 100 * MB


def random_lines(rng: random.Random, count: int) -> Lines:
    up, down = ([round(MB * 10 ** rng.uniform(0, 2)) for _ in range(count)] for _ in range(2))
    return Lines(names(count), np.asarray(up), np.asarray(down), rng.choice((0.0, 0.001, 0.04)))


def as_task(lines: Lines, contributes: np.ndarray, codec: str) -> Task:
    """The same network in matrices: no link is slower than the lines at its ends."""
    links = links_of(lambda i, j: 1e12, lines.up.tolist(), lines.down.tolist(), lines.delay_s)
    return Task(links, V, codec, tuple(np.asarray(lines.members)[contributes].tolist()))


def random_contributors(rng: random.Random, count: int) -> np.ndarray:
    contributes = np.asarray([rng.random() < rng.choice((0.5, 1.0)) for _ in range(count)])
    contributes[rng.randrange(count)] = True
    return contributes


@pytest.mark.parametrize("seed", range(80))
def test_a_crowd_is_planned_as_few_are(seed: int) -> None:
    rng = random.Random(seed)
    lines = random_lines(rng, rng.randint(2, CROWD + 6))
    contributes, codec = random_contributors(rng, len(lines)), rng.choice(("int8", "fp32", "int4"))
    task = as_task(lines, contributes, codec)
    crowd = CrowdTask(lines, contributes, V, codec)
    expected, found = direct(task), crowd_direct(crowd)
    assert found.lanes == expected.lanes, f"seed {seed}"
    assert found.chunk_bytes == expected.chunk_bytes
    assert found.price.busy_s == pytest.approx(expected.price.busy_s)
    assert found.price.last_s == pytest.approx(expected.price.last_s)
    assert found.price.start_s == pytest.approx(expected.price.start_s)
    moved = loads(lines.members, found.lanes, V, contributes).links
    seconds = found.price.seconds
    assert crowd_connections(crowd, found.lanes, seconds) == connections(task.links, moved, seconds)


@pytest.mark.parametrize("seed", range(40))
def test_any_stars_have_the_same_price(seed: int) -> None:
    """Few roots, uneven shares, several lanes of one root, as a retry leaves them."""
    rng = random.Random(seed)
    lines = random_lines(rng, rng.randint(2, 12))
    contributes = random_contributors(rng, len(lines))
    lanes = tuple(Lane(rng.choice(lines.members), rng.randint(1, 300)) for _ in range(rng.randint(1, 9)))
    expected = candidate(as_task(lines, contributes, "int8"), "direct", lanes, 65536).price
    found = crowd_candidate(CrowdTask(lines, contributes, V, "int8"), lanes, 65536).price
    assert found.busy_s == pytest.approx(expected.busy_s), f"seed {seed}"
    assert found.last_s == pytest.approx(expected.last_s), f"seed {seed}"
    assert found.start_s == pytest.approx(expected.start_s), f"seed {seed}"


@pytest.mark.parametrize("seed", range(60))
def test_seats_go_as_fractions_say(seed: int) -> None:
    rng = random.Random(seed)
    fractions = [rng.choice((0.0, 1.0, 1e-9, rng.random())) for _ in range(rng.randint(1, 40))] + [1.0]
    seats = rng.choice((None, 7, 1000))
    assert whole_shares(fractions, seats) == slow_shares(fractions, seats), f"seed {seed}"


def slow_shares(fractions: list[float], seats: int | None) -> list[int]:
    """Hagenbach-Bischoff in exact fractions."""
    votes = [round(each / float(sum(fractions)) * (1 << 40)) for each in fractions]
    wanted = 256 * sum(each > 0 for each in votes) if seats is None else seats
    given = [each * (wanted + 1) // sum(votes) for each in votes]
    while sum(given) > wanted:
        given[max(i for i, held in enumerate(given) if held)] -= 1
    heap = [(Fraction(-each, held + 1), i) for i, (each, held) in enumerate(zip(votes, given, strict=True))]
    heapq.heapify(heap)
    for _ in range(wanted - sum(given)):
        _, winner = heap[0]
        given[winner] += 1
        heapq.heapreplace(heap, (Fraction(-votes[winner], given[winner] + 1), winner))
    divisor = int(np.gcd.reduce(given)) if seats is None else 1
    return [each // divisor for each in given]


# ---- what a coordinator asks -----------------------------------------------------------------------------


def crowd_request(count: int = 200, **changes: object) -> PlanRequest:
    members = names(count)
    return replace(PlanRequest(members, members, V, "int8"), **changes)


def test_an_unknown_crowd_gets_equal_stars() -> None:
    found = choose(crowd_request())
    assert found.lanes == tuple(Lane(member) for member in names(200))
    assert "nothing measured yet, 100 Mbit/s assumed" in found.reason


def test_lines_bound_by_what_single_links_carried() -> None:
    """A probe of one link says that its lines carry at least that."""
    links = (
        LinkRate("p0000", "p0001", 9 * MB, 0.2),
        LinkRate("p0002", "", 4 * MB),
        LinkRate("x", "p0002", MB),
    )
    lines = measured_lines(names(3), links, {"p0000": 5 * MB}, {})
    assert lines.up.tolist() == [5 * MB, 6.5 * MB, 4 * MB], "capped; the median; as seen"
    assert lines.down.tolist() == [9 * MB, 9 * MB, 9 * MB]
    assert (lines.delay_s, lines.assumed) == (0.1, "3 of 6 lines not measured")


def test_a_slow_member_of_a_crowd_is_no_root() -> None:
    seen = [LinkRate(*ends, 20 * MB, 0.08) for member in names(200) for ends in ((member, ""), ("", member))]
    found = choose(crowd_request(links=tuple(seen), max_up={"p0007": MB // 2}))
    assert len(found.lanes) == 199
    assert "p0007" not in {lane.root for lane in found.lanes}
    assert "the uplink of p0007" in found.reason


def test_a_crowds_retry_keeps_lanes_and_chunks() -> None:
    asked = crowd_request()
    first = choose(asked)
    plan = Plan(
        op=OpId(1, 1),
        base_version=0,
        members=asked.members,
        contributions=(),
        ranks={},
        lanes=first.lanes,
        codec="int8",
        deadline_s=600.0,
        chunk_bytes=first.chunk_bytes,
    )
    left = names(199)
    again = choose(crowd_request(members=left, contributors=left, previous=plan))
    assert again.chunk_bytes == first.chunk_bytes
    assert "kept from the attempt before" in again.reason
    assert {lane.root for lane in again.lanes} == set(left)


def test_broken_links_are_avoided_in_a_crowd_too() -> None:
    found = choose(crowd_request(100, broken=frozenset({Edge("p0000", "p0001")})))
    assert len(found.lanes) == 98


def test_members_of_a_crowd_report_their_lines() -> None:
    def reports(count: int) -> tuple[LinkRate, ...]:
        nodes = tuple(NodeId(name, 0) for name in names(count))
        pairs = [(0, other, 5.0, 0.1 * other, 0.01) for other in (1, 2)]
        return _links(nodes, [*pairs, (0, -1, 7.0, 0.0, 0.0), (-1, 0, 8.0, 0.0, 0.0)])

    assert [link.loss for link in reports(CROWD)] == [0.01, 0.01, 0.0, 0.0]
    assert reports(CROWD + 1) == (LinkRate("p0000", "", 7.0, 0.2), LinkRate("", "p0000", 8.0, 0.2))
