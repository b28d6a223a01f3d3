"""What the engine computes: the mean of exactly the plan's contributions, the same bits on every member."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time

import numpy as np
import pytest

from atoll import _native
from atoll.codecs import reference
from atoll.errors import LocalError
from atoll.plan.grid import Grid
from atoll.values import CODECS, OpId
from support.engines import Engines, Running, decoded, encoded, open_engine, power_of

SIZES = [0, 1, 7, 13, 1023, 1_000_000]


def random_values(world: int, numel: int, seed: int) -> dict[str, np.ndarray]:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    return {f"p{i}": (rng.standard_normal(numel) * 10.0**i).astype(np.float32) for i in range(world)}


def random_grid(numel: int, seed: int) -> Grid:
    """A few segments, so that blocks restart."""
    rng = random.Random(seed)
    cuts = sorted(rng.randrange(numel) for _ in range(4)) if numel > 10 else []
    return Grid.of([stop - start for start, stop in zip([0, *cuts], [*cuts, numel], strict=True)])


WORLDS_AND_CODECS = [(world, "int8") for world in (1, 2, 4, 5)] + [(3, codec) for codec in CODECS]


@pytest.mark.parametrize(("world", "codec"), WORLDS_AND_CODECS)
def test_every_member_holds_the_weighted_mean_of_the_formula_to_the_bit(world: int, codec: str) -> None:
    with Engines(world) as engines:
        for attempt, numel in enumerate(SIZES):
            seed = 1000 * world + attempt
            grid, values = random_grid(numel, seed), random_values(world, numel, seed)
            weights = {peer: 1 + index * index for index, peer in enumerate(values)}
            plan = engines.plan(grid, codec, OpId(1, 0, 0, attempt), weights=weights)
            results = engines.reduce(plan, grid, values)
            expected = reference.weighted_mean(
                codec,
                grid.segments,
                [encoded(grid, codec, value) for value in values.values()],
                list(weights.values()),
            )
            assert expected is not None
            for result in results:
                np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("codec", CODECS)
def test_a_member_that_does_not_contribute_still_receives(codec: str) -> None:
    grid = Grid.of([5000])
    with Engines(4) as engines:
        plan = engines.plan(grid, codec, OpId(1, 0), weights={"p1": 1, "p3": 3})
        data = [encoded(grid, codec, power_of(index)) for index in (1, 3)]
        expected = reference.weighted_mean(codec, grid.segments, data, [1, 3])
        assert expected is not None
        for result in engines.reduce(plan, grid):
            np.testing.assert_array_equal(result, expected)


def test_a_root_need_not_contribute_and_a_contributor_need_not_be_a_root() -> None:
    grid = Grid.of([300_000])
    with Engines(4) as engines:
        plan = engines.plan(grid, "fp32", OpId(1, 0), weights={"p0": 1, "p1": 1}, roots=["p1", "p2"])
        for result in engines.reduce(plan, grid):
            np.testing.assert_array_equal(decoded(grid, "fp32", result), np.float32((1 + 2) / 2))


def test_several_ops_at_once_do_not_mix() -> None:
    grid = Grid.of([400_000])
    with Engines(3) as engines:
        plans = [
            engines.plan(
                grid, "fp32", OpId(1, 0, fragment), weights={f"p{fragment % 3}": 1, "p2": fragment + 1}
            )
            for fragment in range(6)
        ]
        all_running = [engines.begin(plan, grid) for plan in plans]
        for plan, running in zip(plans, all_running, strict=True):
            total = sum(c.weight * power_of(int(c.peer[1])) for c in plan.contributions)
            mean = np.float32(np.float32(total) / np.float32(sum(c.weight for c in plan.contributions)))
            for one in running.values():
                assert one.report().ok, one.report().reason
                np.testing.assert_array_equal(decoded(grid, "fp32", one.result), mean)


def test_a_member_that_begins_late_is_waited_for() -> None:
    grid = Grid.of([10_000])
    with Engines(2) as engines:
        plan = engines.plan(grid, "int8", OpId(1, 0))
        first = Running(engines.comms["p0"], plan, grid, encoded(grid, "int8", 1.0))
        time.sleep(0.3)
        second = Running(engines.comms["p1"], plan, grid, encoded(grid, "int8", 2.0))
        assert first.report().ok
        assert second.report().ok
        np.testing.assert_array_equal(first.result, second.result)


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_at_the_sockets_are_those_of_the_formula(codec: str) -> None:
    """Each sends its contribution to the others' shares, and its finished share to each: 2 V (N-1) / N."""
    grid, world = Grid.of([5_000_000]), 3
    with Engines(world) as engines:
        running = engines.begin(engines.plan(grid, codec, OpId(1, 0)), grid)
        reports = [one.report() for one in running.values()]
        formula = 2 * grid.wire_bytes(codec) * (world - 1) / world
        for report, comm in zip(reports, engines.comms.values(), strict=True):
            assert report.stats.sent_bytes == pytest.approx(formula, rel=0.01)
            assert report.stats.received_bytes == pytest.approx(formula, rel=0.01)
            assert comm.stats()["sent_bytes"] == pytest.approx(formula, rel=0.01)


def test_bytes_are_those_that_the_kernel_counted() -> None:
    """TCP_INFO of every link of this process, both ends, against what the engines counted."""
    grid, world = Grid.of([5_000_000]), 3
    with Engines(world) as engines:
        assert all(
            one.report().ok for one in engines.begin(engines.plan(grid, "int8", OpId(1, 0)), grid).values()
        )
        counted = sum(comm.stats()["received_bytes"] for comm in engines.comms.values())
        links = [tcp_received_bytes(int(fd)) for fd in os.listdir("/proc/self/fd")]
        kernel = [received for received in links if received]
        assert len(kernel) == world * (world - 1), "each link has two ends in this process"
        assert counted == pytest.approx(sum(kernel), rel=0.01)


def tcp_received_bytes(fd: int) -> int:
    """tcpi_bytes_received (offset 128 of struct tcp_info) of a connected TCP socket; 0 for anything else."""
    try:
        with socket.socket(fileno=os.dup(fd)) as link:
            link.getpeername()
            return int(
                struct.unpack_from("<Q", link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136), 128)[0]
            )
    except (OSError, struct.error):
        return 0


def test_links_are_kept_between_ops() -> None:
    grid = Grid.of([1000])
    with Engines(3) as engines:
        for round_ in range(5):
            engines.reduce(engines.plan(grid, "fp32", OpId(1, round_)), grid)
        assert [comm.stats()["connections"] for comm in engines.comms.values()] == [2, 2, 2]


def test_an_op_id_serves_once() -> None:
    grid = Grid.of([100])
    with Engines(2) as engines:
        plan = engines.plan(grid, "fp32", OpId(1, 0))
        engines.reduce(plan, grid)
        again = [one.report() for one in engines.begin(plan, grid).values()]
        assert [report.ok for report in again] == [False, False]
        assert "t1/r0/f0/a0 was used before" in again[0].reason


def test_an_op_that_was_aborted_before_it_began_never_begins() -> None:
    grid = Grid.of([100])
    with Engines(1) as engines:
        engines.comms["p0"].abort(OpId(1, 7))
        report = engines.begin(engines.plan(grid, "fp32", OpId(1, 7)), grid)["p0"].report()
        assert not report.ok
        assert "aborted before it began" in report.reason


def test_a_port_in_use_is_one_line_with_the_address() -> None:
    first = open_engine("p0")
    try:
        with pytest.raises(
            LocalError, match=rf"127\.0\.0\.1 port {first.port}: .*in use.*choose a free port"
        ):
            open_engine("p1", port=first.port)
    finally:
        first.close()


def test_other_threads_run_while_one_waits() -> None:
    grid = Grid.of([100])
    with Engines(2) as engines:
        plan = engines.plan(grid, "fp32", OpId(1, 0), deadline_s=1.0)
        waiting = Running(engines.comms["p0"], plan, grid, encoded(grid, "fp32", 1.0))
        counted = 0
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            counted += 1
        assert counted > 1000
        assert not waiting.report().ok


def test_wrong_buffers_are_refused_before_anything_is_sent() -> None:
    grid = Grid.of([1000])
    size = grid.wire_bytes("fp32")
    read_only = np.zeros(size, dtype=np.uint8)
    read_only.flags.writeable = False
    with Engines(1) as engines:
        comm, plan = engines.comms["p0"], engines.plan(grid, "fp32", OpId(1, 0))
        good = encoded(grid, "fp32", 1.0)
        for bad in (np.zeros(2 * size, dtype=np.uint8)[::2], np.zeros(size, dtype=np.int8), read_only):
            with pytest.raises(TypeError):
                comm.reduce(plan, grid, good, bad)
        with pytest.raises(TypeError):
            comm.reduce(plan, grid, np.zeros(2 * size, dtype=np.uint8)[::2], np.empty(size, dtype=np.uint8))
        with pytest.raises(ValueError, match=f"the result has 3 bytes; 1000 elements in fp32 take {size}"):
            comm.reduce(plan, grid, good, np.empty(3, dtype=np.uint8))
        assert comm.reduce(plan, grid, good, np.empty(size, dtype=np.uint8)).ok


def test_malformed_plans_are_refused_with_the_reason() -> None:
    engine = _native.Engine(
        run="r",
        peer="a",
        rank=0,
        session_key=b"k",
        bind_host="127.0.0.1",
        port=0,
        connect_timeout_s=1.0,
        num_workers=1,
    )
    good = {
        "op": (1, 0, 0, 0),
        "nodes": [("a", 0, "127.0.0.1", 1, 0), ("b", 0, "127.0.0.1", 2, 0)],
        "lanes": [(0, [0, 1], [1, 1], [0, 0], [0, 0])],
        "codec": "fp32",
        "boundaries": np.array([0, 300], dtype=np.int64),
        "chunk_starts": np.array([0, 256, 300], dtype=np.int64),
        "chunk_lanes": np.array([0, 0], dtype=np.int64),
        "contribution": np.zeros(1200, dtype=np.uint8),
        "result": np.zeros(1200, dtype=np.uint8),
        "deadline_s": 1.0,
    }
    cases = {
        "not in the plan": {"nodes": [("b", 0, "127.0.0.1", 2, 0)]},
        "in the plan twice": {"nodes": [("a", 0, "h", 1, 0), ("a", 0, "h", 1, 0)]},
        "unknown codec": {"codec": "int7"},
        "weight of 0": {"lanes": [(0, [0, 1], [1, 0], [0, 0], [0, 0])]},
        "has root 9": {"lanes": [(9, [0, 1], [1, 1], [0, 0], [0, 0])]},
        "node 5 of 2": {"lanes": [(0, [0, 5], [1, 1], [0, 0], [0, 0])]},
        "no sources": {"lanes": [(0, [], [], [0, 0], [0, 0])]},
        "2 sources but 1 weights": {"lanes": [(0, [0, 1], [1], [0, 0], [0, 0])]},
        "does not lead from node 0": {"lanes": [(1, [0, 1], [1, 1], [0, 1], [1, 1])]},
        "has 1 entries for 2 nodes": {"lanes": [(0, [0, 1], [1, 1], [0], [0, 0])]},
        "source 1 is not on the way up": {"lanes": [(0, [0, 1], [1, 1], [0, -1], [0, 0])]},
        "inside a block": {"chunk_starts": np.array([0, 100, 300], dtype=np.int64)},
        "the grid 0 to 300": {"chunk_starts": np.array([0, 256, 299], dtype=np.int64)},
        "on lane 3 of 1": {"chunk_lanes": np.array([0, 3], dtype=np.int64)},
        "give its contribution": {"contribution": None},
        "has 7 bytes; the plan asks for 1200": {"contribution": np.zeros(7, dtype=np.uint8)},
        "deadline must be above 0": {"deadline_s": 0.0},
    }
    try:
        for reason, change in cases.items():
            with pytest.raises(ValueError, match=reason):
                engine.start(**{**good, **change})
        with pytest.raises(ValueError, match="op t1/r0/f0/a0 is not running here"):
            engine.wait((1, 0, 0, 0), 0.0)
    finally:
        engine.close()


def test_threads_and_descriptors_come_back() -> None:
    import psutil

    process = psutil.Process()
    before = (process.num_threads(), process.num_fds())
    grid = Grid.of([10_000])
    with Engines(3) as engines:
        engines.reduce(engines.plan(grid, "int8", OpId(1, 0)), grid)
        assert process.num_fds() == before[1] + sum(
            comm.stats()["open_fds"] for comm in engines.comms.values()
        )
        assert process.num_threads() > before[0]
    assert process.num_fds() == before[1]
    # The kernel counts a thread that was joined for a moment longer.
    deadline_s = time.monotonic() + 10
    while process.num_threads() != before[0]:
        assert time.monotonic() < deadline_s, f"{process.num_threads()} threads, {before[0]} before"
        time.sleep(0.01)


def test_closing_ends_what_runs() -> None:
    grid = Grid.of([100])
    engines = Engines(2)
    plan = engines.plan(grid, "fp32", OpId(1, 0))
    waiting = Running(engines.comms["p0"], plan, grid, encoded(grid, "fp32", 1.0))
    time.sleep(0.1)
    closer = threading.Thread(target=engines.comms["p0"].close)
    closer.start()
    report = waiting.report()
    closer.join(5.0)
    engines.comms["p1"].close()
    assert not closer.is_alive()
    assert "closed" in report.reason
