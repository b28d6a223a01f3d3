"""Peers of one, two and three ranks reduce together: by engines, by loopback, and as if each were one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from msgspec.structs import replace

from atoll import kernels
from atoll.comm.base import Bytes, Communicator
from atoll.comm.digests import combined_digest, route_digests
from atoll.comm.loopback import LoopbackCommunicator, LoopbackHub
from atoll.comm.trees import reduce_here
from atoll.plan.grid import Grid
from atoll.plan.routes import routing_of
from atoll.plan.traffic import FRAME_BYTES, traffic
from atoll.values import Contribution, Edge, Lane, NodeId, OpId, Plan, Range
from support.rank_engines import GRID, Cut, RankEngines, assembled, begin, cut_of, plan_with, reduce_all
from support.trees import ring_lanes, two_level_lanes

ONE_TWO_THREE = {"a": cut_of(1), "b": cut_of(2), "c": cut_of(3)}


def values_for(peers: Mapping[str, Cut], seed: int, grid: Grid = GRID) -> dict[str, np.ndarray]:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    return {peer: rng.standard_normal(grid.numel, dtype=np.float32) for peer in peers}


def expected_of(plan: Plan, grid: Grid, values: Mapping[str, np.ndarray]) -> Bytes:
    """From whole vectors, in this process."""
    routing, updates = routing_of(plan, grid), {}
    for each in plan.contributions:
        updates[each.peer] = np.empty(routing.grid.wire_bytes(plan.codec), np.uint8)
        assert routing.whole.encode(plan.codec, values[each.peer], updates[each.peer])
    finished = reduce_here(plan, grid, updates)
    assert finished is not None
    return finished


def check(plan: Plan, grid: Grid, values: Mapping[str, np.ndarray], results: Mapping[NodeId, Bytes]) -> None:
    """Every peer has the expected bytes, and votes the same digest for them."""
    routing, expected, digests = routing_of(plan, grid), expected_of(plan, grid, values), set()
    for peer in plan.members:
        np.testing.assert_array_equal(assembled(routing, plan.codec, peer, results), expected)
        ranks = range(len(plan.ranks[peer]))
        rows = [route_digests(routing, plan.codec, peer, rank, results[NodeId(peer, rank)]) for rank in ranks]
        digests.add(combined_digest(routing, rows))
    assert len(digests) == 1


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "topk"])
@pytest.mark.parametrize("chunk_bytes", [1 << 20, 2000])
def test_one_two_and_three_ranks(codec: str, chunk_bytes: int) -> None:
    values = values_for(ONE_TWO_THREE, 5)
    with RankEngines(ONE_TWO_THREE) as engines:
        contributions = (Contribution("a", 2), Contribution("b", 1), Contribution("c", 4))
        plan = engines.plan(codec, OpId(1, 0), contributions=contributions, chunk_bytes=chunk_bytes)
        results = reduce_all(engines.comms, plan, GRID, values)
        check(plan, GRID, values, results)
        if codec != "fp32":
            return
    # In fp32 blocks do not matter: these are the bits of peers of one rank.
    alone = {peer: cut_of(1) for peer in values}
    with RankEngines(alone) as engines:
        plain = engines.plan(codec, OpId(1, 0), contributions=contributions)
        single = reduce_all(engines.comms, plain, GRID, values)[NodeId("a")].view(np.float32)
    mean = np.empty(GRID.numel, np.float32)
    routing_of(plan, GRID).whole.decode(codec, results[NodeId("a")], mean)
    np.testing.assert_array_equal(mean, single)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_two_peers_of_two_ranks_have_two_separate_routes(codec: str) -> None:
    cuts = {"a": cut_of(2), "b": cut_of(2)}
    values = values_for(cuts, 6)
    with RankEngines(cuts) as engines:
        plan = engines.plan(codec, OpId(1, 0))
        check(plan, GRID, values, reduce_all(engines.comms, plan, GRID, values))
        for comm in engines.comms.values():
            assert comm.stats()["connections"] == 1  # with the rank of its own number


def test_bytes_are_those_of_the_plan() -> None:
    """And a frame that begins the op, on each connection. Of the second op, when those are there; the last
    acknowledgements may come after the reports."""
    values = values_for(ONE_TWO_THREE, 9)
    with RankEngines(ONE_TWO_THREE) as engines:

        def counted(what: str) -> dict[str, int]:
            rows = [(node.peer, comm.stats()[what]) for node, comm in engines.comms.items()]
            return {peer: sum(number for owner, number in rows if owner == peer) for peer in values}

        plan = engines.plan("int8", OpId(1, 0), chunk_bytes=2000)
        moved = traffic(
            plan.lanes,
            plan.members,
            routing_of(plan, GRID).grid,
            "int8",
            chunk_bytes=2000,
            routes=routing_of(plan, GRID).cuts,
        )
        reduce_all(engines.comms, plan, GRID, values)
        before, connections = settled(lambda: counted("sent_bytes")), counted("connections")
        expected = {peer: each.sent_bytes + FRAME_BYTES * connections[peer] for peer, each in moved.items()}
        reduce_all(engines.comms, replace(plan, op=OpId(1, 1)), GRID, values)
        after = settled(lambda: counted("sent_bytes"))
        assert {peer: each - before[peer] for peer, each in after.items()} == expected


def settled(count: Callable[[], dict[str, int]]) -> dict[str, int]:
    """What `count` says when it has said the same for a fifth of a second; within ten seconds."""
    deadline_s, last, since_s = time.monotonic() + 10, count(), time.monotonic()
    while time.monotonic() - since_s < 0.2:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
        now = count()
        if now != last:
            last, since_s = now, time.monotonic()
    return last


def test_any_cut_and_a_rank_that_owns_nothing() -> None:
    half = GRID.numel // 2
    cuts: dict[str, Cut] = {
        "a": ((Range(half, GRID.numel),), (Range(0, half),)),
        "b": ((Range(0, 1), Range(700, GRID.numel)), (), (Range(1, 700),)),
        "c": cut_of(5),
    }
    values = values_for(cuts, 7)
    with RankEngines(cuts) as engines:
        plan = engines.plan("int8", OpId(1, 0))
        results = reduce_all(engines.comms, plan, GRID, values)
        assert results[NodeId("b", 1)].size == 0
        check(plan, GRID, values, results)


@pytest.mark.parametrize("shape", ["ring", "two-level", "relay"])
def test_other_trees_than_stars(shape: str) -> None:
    cuts = {"a": cut_of(1), "b": cut_of(2), "c": cut_of(3), "d": cut_of(2)}
    values = values_for(cuts, 8)
    members = tuple(cuts)
    lanes = {
        "ring": ring_lanes(members),
        "two-level": two_level_lanes(members, [(0, 2), (1, 3)]),
        "relay": (Lane("c", up=(1, 2, 2, 2), down=(1, 2, 2, 0)),),
    }
    with RankEngines(cuts) as engines:
        contributions = tuple(Contribution(peer, 1) for peer in "acd")
        plan = engines.plan(
            "int8", OpId(1, 0), lanes=lanes[shape], contributions=contributions, chunk_bytes=1000
        )
        check(plan, GRID, values, reduce_all(engines.comms, plan, GRID, values))


def test_loopback_and_engines_give_the_same_bytes() -> None:
    values = values_for(ONE_TWO_THREE, 9)
    with RankEngines(ONE_TWO_THREE) as engines:
        plan = engines.plan("int8", OpId(1, 0))
        by_engine = reduce_all(engines.comms, plan, GRID, values)
        hub = LoopbackHub()
        comms: dict[NodeId, Communicator] = {
            node: LoopbackCommunicator(hub, node.peer, node.rank) for node in engines.comms
        }
        for node, result in reduce_all(comms, plan, GRID, values).items():
            np.testing.assert_array_equal(result, by_engine[node])


def test_links_to_several_ranks_of_a_peer_are_one_link() -> None:
    shapes = [(3000, 200)]
    grid = Grid.of([3000 * 200])
    cuts = {"a": cut_of(1, shapes), "b": cut_of(2, shapes)}
    values = values_for(cuts, 12, grid)
    with RankEngines(cuts) as engines:
        running = begin(engines.comms, engines.plan("fp32", OpId(1, 0)), grid, values)
        reports = {node: one.report() for node, one in running.items()}
    names = [(link.source, link.target) for link in reports[NodeId("a")].stats.links]
    assert ("a", "b") in names
    assert len(set(names)) == len(names)


def test_a_digest_of_peers_of_one_rank_is_that_of_the_bytes() -> None:
    cuts = {"a": cut_of(1), "b": cut_of(1)}
    routing = routing_of(plan_with(cuts, {}, "int8", OpId(1, 0)), GRID)
    data = np.arange(GRID.wire_bytes("int8"), dtype=np.uint32).astype(np.uint8)
    rows = route_digests(routing, "int8", "a", 0, data)
    assert combined_digest(routing, [rows]) == kernels.digest_bytes(data).hex()
    with pytest.raises(ValueError, match=r"no rank gave the digests of routes \[0\]"):
        combined_digest(routing, [])


def test_ranks_that_own_too_little_are_refused_in_one_line() -> None:
    cuts = {"a": cut_of(1), "b": ((Range(0, 9),), (Range(9, GRID.numel - 1),))}
    plan = plan_with(cuts, {}, "int8", OpId(1, 0))
    hub = LoopbackHub()
    with RankEngines({"a": cuts["a"]}) as engines:
        for comm in (engines.comms[NodeId("a")], LoopbackCommunicator(hub, "a")):
            report = comm.reduce(plan, GRID, None, np.empty(0, np.uint8))
            assert not report.ok
            assert (
                report.reason
                == f"op t1/r0/f0/a0: nobody of peer 'b' owns elements {GRID.numel - 1} to {GRID.numel}"
            )


def reports_of_a_whole(engines: RankEngines, plan: Plan, grid: Grid, values: Mapping[str, np.ndarray]) -> int:
    """What rank 2 of c sends where nothing is kept."""
    fresh = replace(plan, op=OpId(1, 1))
    reports = {node: one.report() for node, one in begin(engines.comms, fresh, grid, values).items()}
    return reports[NodeId("c", 2)].stats.sent_bytes


def test_a_rank_that_stays_away_is_named_and_the_next_attempt_sends_only_what_lacks() -> None:
    """Rank 1 of b takes no part at first: who needs it names b. Then all do, and what came before is used again."""
    shapes = [(3000, 70), (911, 33)]
    grid = Grid.of([3000 * 70, 911 * 33])
    cuts = {"a": cut_of(1, shapes), "b": cut_of(2, shapes), "c": cut_of(3, shapes)}
    values = values_for(cuts, 10, grid)
    lost = NodeId("b", 1)
    with RankEngines(cuts) as engines:
        stamped = tuple(Contribution(peer, 1, f"of {peer}") for peer in cuts)
        first = engines.plan("int8", OpId(1, 0), contributions=stamped, chunk_bytes=10_000, deadline_s=5.0)
        present = {node: comm for node, comm in engines.comms.items() if node != lost}
        running = begin(present, first, grid, values)
        reports = {node: one.report() for node, one in running.items()}
        touched = {NodeId("a"), NodeId("c", 1), NodeId("c", 2)}  # those that share a route with it
        for node, report in reports.items():
            assert report.ok == (node not in touched), report.reason
            if node in touched:
                assert Edge("b", node.peer) in report.broken, report
                assert {edge for edge in report.broken if "b" not in (edge.source, edge.target)} == set()
                assert "b.1" in report.reason
        again = replace(first, op=OpId(1, 0, 0, 1), deadline_s=20.0)
        second = begin(engines.comms, again, grid, values, running)
        retried = {node: one.report() for node, one in second.items()}
        assert all(report.ok for report in retried.values()), retried
        check(again, grid, values, {node: one.result for node, one in second.items()})
        # The route of the first ranks was through, so nothing of it comes again; nor do contributions to the others.
        assert retried[NodeId("c", 0)].stats.sent_bytes < reports[NodeId("c", 0)].stats.sent_bytes / 10
        assert retried[NodeId("c", 2)].stats.sent_bytes < 0.8 * reports_of_a_whole(
            engines, again, grid, values
        )


def test_a_rank_that_is_lost_in_the_middle_breaks_the_links_of_its_peer() -> None:
    shapes = [(3000, 70)]
    grid = Grid.of([3000 * 70])
    cuts = {"a": cut_of(1, shapes), "b": cut_of(2, shapes), "c": cut_of(3, shapes)}
    values, lost = values_for(cuts, 11, grid), NodeId("c", 2)
    with RankEngines(cuts, connect_timeout_s=2.0, progress_timeout_s=2.0, max_up_bytes_per_s=2e5) as engines:
        plan = engines.plan("fp32", OpId(1, 0), deadline_s=30.0, chunk_bytes=10_000)
        running = begin(engines.comms, plan, grid, values)
        begun_s = time.monotonic()
        while engines.comms[lost].stats()["received_bytes"] < 30_000:
            assert time.monotonic() - begun_s < 20.0
            time.sleep(0.01)
        engines.comms[lost].close()
        assert not running[lost].report().ok  # it was in the middle
        touched = {NodeId("a"), NodeId("b", 1)}  # those that share a route with it
        reports = {node: running[node].report() for node in touched}
        for report in reports.values():
            assert not report.ok
            assert report.broken
            assert all("c" in (edge.source, edge.target) for edge in report.broken), report
            assert "c.2" in report.reason
        # The others name nobody, but may wait for one that has given up: their peers end the op for them.
        for node in running.keys() - touched - {lost}:
            engines.comms[node].abort(plan.op)
            assert running[node].report().broken == ()
