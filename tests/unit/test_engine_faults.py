"""When a peer dies, freezes, gives up or holds another plan, the op ends in time and names the links."""

from __future__ import annotations

import signal
import socket
import threading
import time

import numpy as np
import pytest

from atoll.plan.grid import Grid
from atoll.values import Edge, OpId
from support.engines import (
    KEY,
    Engines,
    Running,
    decoded,
    encoded,
    open_engine,
    plan_for,
    power_of,
)
from support.peer_process import peer_process
from support.slack import SLACK_S

pytestmark = pytest.mark.usefixtures("stream")
BIG = Grid.of([5_000_000])  # 20 MB in fp32: 10 MB each way between two


def edges_between(a: str, b: str) -> set[Edge]:
    return {Edge(a, b), Edge(b, a)}


@pytest.mark.fault
@pytest.mark.parametrize("name", ["a", "z"], ids=["it dials", "it is dialled"])
def test_survivors_name_a_peer_that_was_killed_and_go_on_without_it(name: str) -> None:
    with (
        Engines(2, connect_timeout_s=3.0) as engines,
        peer_process(name, 64.0, "--halt", "SIGKILL", "--after", "3000000") as victim,
    ):
        plan = plan_for(engines.ports | {name: victim.port}, BIG.numel, "fp32", OpId(1, 0))
        victim.begin(plan)
        running = engines.begin(plan, BIG)
        reports = {peer: one.report() for peer, one in running.items()}
        assert victim.halted(signal.SIGKILL)
        for peer, report in reports.items():
            assert not report.ok
            assert report.broken, report.reason
            assert set(report.broken) <= edges_between(peer, name)
            assert f"{name}.0" in report.reason
            assert report.stats.wire_s < 3.0 + SLACK_S  # the deadline is 20 s: it was the link that told
        assert_exact_without(engines, OpId(1, 0, 0, 1))


@pytest.mark.fault
@pytest.mark.parametrize("name", ["a", "z"], ids=["it dials", "it is dialled"])
def test_survivors_name_a_peer_that_is_frozen_by_the_deadline(name: str) -> None:
    with Engines(2, connect_timeout_s=60.0) as engines:
        with peer_process(name, 64.0, "--halt", "SIGSTOP", "--after", "3000000") as victim:
            ports = engines.ports | {name: victim.port}
            plan = plan_for(ports, BIG.numel, "fp32", OpId(1, 0), deadline_s=3.0)
            victim.begin(plan)
            running = engines.begin(plan, BIG)
            reports = {peer: one.report() for peer, one in running.items()}
            assert victim.halted(signal.SIGSTOP)
            for peer, report in reports.items():
                assert not report.ok
                assert report.broken, report.reason
                assert set(report.broken) <= edges_between(peer, name)
                assert "the deadline of 3 s passed; still missing" in report.reason
                assert report.stats.wire_s < 3.0 + SLACK_S
            assert_exact_without(engines, OpId(1, 0, 0, 1))


@pytest.mark.fault
def test_a_frozen_peer_that_takes_no_bytes_is_found_before_the_deadline() -> None:
    with Engines(2, connect_timeout_s=1.0) as engines:
        with peer_process("z", 64.0, "--halt", "SIGSTOP", "--after", "100000") as victim:
            grid = Grid.of([30_000_000])  # more than the socket buffers take
            plan = plan_for(
                engines.ports | {"z": victim.port}, grid.numel, "fp32", OpId(1, 0), deadline_s=60.0
            )
            victim.begin(plan)
            reports = {peer: one.report() for peer, one in engines.begin(plan, grid).items()}
            assert victim.halted(signal.SIGSTOP)
            assert all(not report.ok for report in reports.values())
            named = {edge for report in reports.values() for edge in report.broken}
            assert any("z" in (edge.source, edge.target) for edge in named)
            assert min(report.stats.wire_s for report in reports.values()) < 15.0


@pytest.mark.fault
def test_an_aborted_op_names_who_has_not_answered() -> None:
    """The coordinator gives an attempt up because one member said no: the others still say what they know."""
    with Engines(2, connect_timeout_s=60.0) as engines:
        with peer_process("z", 64.0, "--halt", "SIGSTOP", "--after", "3000000") as victim:
            plan = plan_for(
                engines.ports | {"z": victim.port}, BIG.numel, "fp32", OpId(1, 0), deadline_s=60.0
            )
            victim.begin(plan)
            running = engines.begin(plan, BIG)
            give_up_at = time.monotonic() + 30.0
            while not victim.halted(signal.SIGSTOP):
                assert time.monotonic() < give_up_at, "the fault never fired"
            time.sleep(1.5)  # longer than the second after which a node counts as silent
            for peer, one in running.items():
                engines.comms[peer].abort(plan.op)
                report = one.report()
                assert not report.ok
                assert report.reason == "aborted; silent: z.0"
                assert report.broken
                assert set(report.broken) <= edges_between(peer, "z")
            assert_exact_without(engines, OpId(1, 0, 0, 1))


def assert_exact_without(engines: Engines, op: OpId) -> None:
    """The same engines reduce again, and the sum is that of the survivors to the bit."""
    plan = engines.plan(BIG, "fp32", op)
    expected = np.float32(sum(power_of(i) for i in range(len(engines.comms))) / len(engines.comms))
    for result in engines.reduce(plan, BIG):
        np.testing.assert_array_equal(decoded(BIG, "fp32", result), expected)


@pytest.mark.fault
def test_two_processes_reduce() -> None:
    with peer_process("a", 1.0) as a, peer_process("b", 2.0) as b:
        plan = plan_for({"a": a.port, "b": b.port}, BIG.numel, "int8", OpId(1, 0))
        a.begin(plan)
        b.begin(plan)
        assert a.report().ok
        assert b.report().ok


def test_a_peer_that_is_not_there_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Engines(1) as engines:
        plan = plan_for(engines.ports | {"z": port}, 1000, "fp32", OpId(1, 0))
        report = engines.begin(plan, Grid.of([1000]))["p0"].report()
        assert not report.ok
        assert set(report.broken) == edges_between("p0", "z")
        assert f"could not connect to 127.0.0.1 port {port}" in report.reason
        assert report.stats.wire_s < 5.0


def test_a_peer_that_never_calls_is_named_after_the_connect_timeout() -> None:
    with Engines(1, connect_timeout_s=0.5) as engines:
        plan = plan_for(engines.ports | {"a": 1}, 1000, "fp32", OpId(1, 0))
        report = engines.begin(plan, Grid.of([1000]))["p0"].report()
        assert not report.ok
        assert set(report.broken) == edges_between("p0", "a")
        assert "a.0 did not connect within 0.5 s" in report.reason


def test_a_peer_with_another_session_key_is_refused_and_named() -> None:
    grid = Grid.of([1000])
    stranger = open_engine("z", key=b"another key", connect_timeout_s=1.0)
    try:
        with Engines(1, connect_timeout_s=1.0) as engines:
            plan = plan_for(engines.ports | {"z": stranger.port}, grid.numel, "fp32", OpId(1, 0))
            theirs = Running(stranger, plan, grid, encoded(grid, "fp32", 1.0))
            ours = engines.begin(plan, grid)["p0"].report()
            assert not ours.ok
            assert "refused our proof" in ours.reason
            assert set(ours.broken) == edges_between("p0", "z")
            assert not theirs.report().ok
            assert stranger.stats()["refused_hellos"] == 1

            stranger.set_session_key(KEY)  # the coordinator gave both the same after all
            plan = plan_for(engines.ports | {"z": stranger.port}, grid.numel, "fp32", OpId(1, 1))
            theirs = Running(stranger, plan, grid, encoded(grid, "fp32", 1.0))
            assert engines.begin(plan, grid)["p0"].report().ok
            assert theirs.report().ok
    finally:
        stranger.close()


def test_abort_from_another_thread_ends_the_wait_soon_and_frees_the_buffers() -> None:
    with Engines(2) as engines:
        plan = engines.plan(BIG, "fp32", OpId(1, 0))
        running = Running(engines.comms["p0"], plan, BIG, encoded(BIG, "fp32", 1.0))
        time.sleep(0.2)
        begin = time.monotonic()
        threading.Thread(target=engines.comms["p0"].abort, args=(plan.op,)).start()
        report = running.report()
        assert time.monotonic() - begin < 0.1 + SLACK_S  # the deadline is 20 s
        assert (report.ok, report.reason) == (False, "aborted")


def test_an_abort_in_the_middle_of_a_transfer_leaves_links_and_other_ops_alone() -> None:
    """p2 never begins the doomed op, so it cannot end by itself; what is on the wire disturbs nothing."""
    with Engines(3) as engines:
        doomed = engines.plan(BIG, "fp32", OpId(1, 0, 0))
        healthy = engines.plan(BIG, "fp32", OpId(1, 0, 1))
        first = {
            peer: Running(engines.comms[peer], doomed, BIG, encoded(BIG, "fp32", 9.0))
            for peer in ("p0", "p1")
        }
        second = engines.begin(healthy, BIG)
        while engines.comms["p0"].stats()["received_bytes"] < 2_000_000:
            time.sleep(0.0005)
        for peer, one in first.items():
            engines.comms[peer].abort(doomed.op)
            assert one.report().reason == "aborted"
            one.result[:] = 0xFF
        for one in second.values():
            assert one.report().ok, one.report().reason
            np.testing.assert_array_equal(decoded(BIG, "fp32", one.result), np.float32((1 + 2 + 4) / 3))
        for one in first.values():
            assert (one.result == 0xFF).all(), "a buffer was written after its report"
        assert [comm.stats()["connections"] for comm in engines.comms.values()] == [2, 2, 2]


def test_a_deadline_names_only_the_member_that_is_late() -> None:
    """p2 never begins. p0 also lacks what p1 could not finish, but p1 is alive and not to blame."""
    grid = Grid.of([3000])
    with Engines(3) as engines:
        warm = engines.plan(grid, "fp32", OpId(1, 0))
        engines.reduce(warm, grid)
        plan = engines.plan(grid, "fp32", OpId(1, 1), deadline_s=2.5)
        present = {
            peer: Running(engines.comms[peer], plan, grid, encoded(grid, "fp32", 1.0))
            for peer in ("p0", "p1")
        }
        for peer, one in present.items():
            report = one.report()
            assert not report.ok
            assert set(report.broken) == edges_between(peer, "p2"), report.reason
            assert report.stats.wire_s < plan.deadline_s + SLACK_S


def test_members_with_different_plans_are_told_apart() -> None:
    grid = Grid.of([1000])
    with Engines(2) as engines:
        plans = {
            "p0": engines.plan(grid, "fp32", OpId(1, 0), weights={"p0": 1, "p1": 1}),
            "p1": engines.plan(grid, "fp32", OpId(1, 0), weights={"p0": 1, "p1": 2}),
        }
        running = {
            peer: Running(engines.comms[peer], plan, grid, encoded(grid, "fp32", 1.0))
            for peer, plan in plans.items()
        }
        for peer, other in (("p0", "p1"), ("p1", "p0")):
            report = running[peer].report()
            assert not report.ok
            assert f"{other}.0 holds another plan for op t1/r0/f0/a0" in report.reason
            assert report.broken == ()
        engines.reduce(engines.plan(grid, "fp32", OpId(1, 1)), grid)


def test_members_with_different_layouts_are_told_apart() -> None:
    with Engines(2) as engines:
        running = {}
        for peer, grid in (("p0", Grid.of([1000])), ("p1", Grid.of([500, 500]))):
            plan = engines.plan(grid, "int8", OpId(1, 0))
            running[peer] = Running(engines.comms[peer], plan, grid, encoded(grid, "int8", 1.0))
        for one in running.values():
            assert "another plan" in one.report().reason


def test_a_contribution_that_is_not_finite_fails_the_attempt_on_its_root() -> None:
    grid = Grid.of([600])
    with Engines(2) as engines:
        plan = engines.plan(grid, "fp32", OpId(1, 0), roots=["p0"], deadline_s=5.0)
        damaged = encoded(grid, "fp32", 1.0)
        damaged.view(np.float32)[333] = np.nan
        root = Running(engines.comms["p0"], plan, grid, encoded(grid, "fp32", 1.0))
        sender = Running(engines.comms["p1"], plan, grid, damaged)
        report = root.report()
        engines.comms["p1"].abort(plan.op)
        assert not report.ok
        assert "the mean of chunk 0 (elements 0 to 600) is not finite" in report.reason
        assert not sender.report().ok


def test_a_peer_that_comes_back_under_its_name_is_connected_anew() -> None:
    grid = Grid.of([1000])
    with Engines(2) as engines:
        engines.reduce(engines.plan(grid, "fp32", OpId(1, 0)), grid)
        for peer in ("p0", "p1"):
            engines.comms[peer].close()
            engines.comms[peer] = open_engine(peer)
            attempt = 1 + int(peer[1])
            engines.reduce(engines.plan(grid, "fp32", OpId(1, attempt)), grid)
