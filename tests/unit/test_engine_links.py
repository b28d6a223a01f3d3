"""Several links per pair: opened once, kept, replaced when they break; an op survives as long as one can be had."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest

from atoll.plan.grid import Grid
from atoll.values import OpId, Plan
from support.cutting_proxy import CuttingProxy
from support.engines import KEY, Engines, Running, decoded, encoded, open_engine, plan_for
from support.peer_process import peer_process
from support.raw_peer import ACK_CONTRIBUTION, BEGIN, CONTRIBUTION, FINISHED, PING, Frame, RawPeer
from support.slack import SLACK_S

pytestmark = pytest.mark.usefixtures("stream")
GRID = Grid.of([2_000_000])  # 8 MB in fp32, 4 MB each way between two
SEEDS = range(6)


def with_connections(plan: Plan, connections: int) -> Plan:
    return msgspec.structs.replace(plan, connections=connections)


def assert_exact(running: dict[str, Running], mean: float, grid: Grid = GRID) -> None:
    for peer, one in running.items():
        report = one.report()
        assert report.ok, f"{peer}: {report.reason}"
        np.testing.assert_array_equal(decoded(grid, "fp32", one.result), np.float32(mean))


def until(what: str, holds: object, within_s: float = 5.0 + SLACK_S) -> None:
    end = time.monotonic() + within_s
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < end, what
        time.sleep(0.005)


def test_as_many_links_as_the_plan_says_are_opened_once_and_kept() -> None:
    with Engines(3) as engines:
        for round_ in range(3):
            plan = with_connections(engines.plan(GRID, "int8", OpId(1, round_)), 5)
            engines.reduce(plan, GRID)
            until(
                "all links are up",
                lambda: all(c.stats()["connections"] == 10 for c in engines.comms.values()),
            )
        assert all(comm.stats()["broken_links"] == 0 for comm in engines.comms.values())


@dataclass(frozen=True)
class Cut:
    """Two engines, each reachable only through a proxy of its own."""

    engines: Engines
    proxies: tuple[CuttingProxy, ...]

    def plan(self, op: OpId, connections: int) -> Plan:
        ports = {peer: proxy.port for peer, proxy in zip(self.engines.comms, self.proxies, strict=True)}
        return with_connections(plan_for(ports, GRID.numel, "fp32", op), connections)


@contextmanager
def cut(*cuts: list[int]) -> Iterator[Cut]:
    with ExitStack() as stack:
        engines = stack.enter_context(Engines(2))
        proxies = tuple(
            stack.enter_context(CuttingProxy(port, after))
            for port, after in zip(engines.ports.values(), cuts, strict=True)
        )
        yield Cut(engines, proxies)


@pytest.mark.fault
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("connections", [1, 4])
def test_a_reset_at_any_byte_costs_time_and_nothing_else(connections: int, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    # The hello takes 576 bytes; 8 MB pass in all.
    after = [rng.choice([rng.randrange(1, 1000), rng.randrange(4_000_000 // connections)]) for _ in range(3)]
    with cut([rng.randrange(1, 500_000)], after) as both:
        plan = both.plan(OpId(1, 0), connections)
        assert_exact(both.engines.begin(plan, GRID), 1.5)
        assert both.proxies[1].done, "no connection was cut"
        plan = both.plan(OpId(1, 1), connections)
        assert_exact(both.engines.begin(plan, GRID), 1.5)


@pytest.mark.fault
def test_one_of_several_links_is_killed_in_the_middle_and_replaced() -> None:
    with Engines(2) as engines:
        warm = with_connections(engines.plan(Grid.of([1000]), "fp32", OpId(1, 0)), 4)
        engines.reduce(warm, Grid.of([1000]))
        until("all links are up", lambda: engines.comms["p0"].stats()["connections"] == 4)
        grid = Grid.of([20_000_000])
        before = engines.comms["p0"].stats()["received_bytes"]
        running = engines.begin(with_connections(engines.plan(grid, "fp32", OpId(1, 1)), 4), grid)
        until("data flows", lambda: engines.comms["p0"].stats()["received_bytes"] > before + 1_000_000)
        reset_a_link(engines.comms["p0"].port, engines.comms["p1"].port)
        assert_exact(running, 1.5, grid)
        assert [comm.stats()["broken_links"] for comm in engines.comms.values()] == [1, 1]
        attempts = iter(range(1000))

        def replaced() -> bool:  # links are dialled while an op needs them
            again = engines.plan(Grid.of([1000]), "fp32", OpId(1, 2, 0, next(attempts)), connections=4)
            engines.reduce(again, Grid.of([1000]))
            return engines.comms["p0"].stats()["connections"] == 4

        until("it was replaced", replaced)


def reset_a_link(*ports: int) -> None:
    """Resets one TCP connection of this process that leads to one of the ports: connect() to AF_UNSPEC does."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.getpeername()[1] not in ports:
                    continue
                assert libc.connect(one.fileno(), bytes(16), 16) == 0, os.strerror(ctypes.get_errno())
                return
        except OSError:  # no socket, or not connected
            continue
    raise AssertionError("there is no such connection")


@pytest.mark.fault
@pytest.mark.parametrize("name", ["a", "z"], ids=["it dials", "it is dialled"])
@pytest.mark.parametrize("connections", [1, 8])
def test_a_killed_process_is_found_long_before_any_timeout(name: str, connections: int) -> None:
    """Both timeouts are a minute: it is the refusal of a new connection that tells."""
    grid = Grid.of([5_000_000])
    comm = open_engine("m", connect_timeout_s=60.0, progress_timeout_s=60.0)
    try:
        with peer_process(name, 64.0, "--halt", "SIGKILL", "--after", "3000000") as victim:
            ports = {"m": comm.port, name: victim.port}
            plan = with_connections(
                plan_for(ports, grid.numel, "fp32", OpId(1, 0), deadline_s=60.0), connections
            )
            victim.begin(plan)
            report = Running(comm, plan, grid, encoded(grid, "fp32", 1.0)).report()
            assert victim.halted(signal.SIGKILL)
            assert not report.ok
            assert f"no link with {name}.0" in report.reason
            assert f"could not connect to 127.0.0.1 port {victim.port}" in report.reason
            assert report.broken
            assert report.stats.wire_s < SLACK_S
    finally:
        comm.close()


def test_a_link_that_came_after_another_broke_does_not_hide_that_the_process_is_gone() -> None:
    """Hellos under way come through after their process has died, too. Both timeouts are a minute."""
    grid = Grid.of([5_000_000])
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = unused.getsockname()[1]
    comm = open_engine("m", connect_timeout_s=60.0, progress_timeout_s=60.0)
    try:
        plan = with_connections(
            plan_for({"m": comm.port, "a": closed}, grid.numel, "fp32", OpId(1, 0), deadline_s=60.0), 3
        )
        running = Running(comm, plan, grid, encoded(grid, "fp32", 1.0))
        links = [RawPeer(comm.port, "a", "m", KEY) for _ in range(2)]
        links.pop(0).close()
        until("the first link broke", lambda: comm.stats()["broken_links"] == 1)
        links.append(RawPeer(comm.port, "a", "m", KEY))
        until("another came", lambda: comm.stats()["accepted_links"] == 3)
        for link in links:
            link.close()
        report = running.report()
        assert "no link with a.0" in report.reason
        assert report.stats.wire_s < SLACK_S
    finally:
        comm.close()


@pytest.mark.fault
@pytest.mark.parametrize("name", ["a", "z"], ids=["it dials", "it is dialled"])
@pytest.mark.parametrize("connections", [1, 8])
def test_a_frozen_process_is_found_by_the_progress_timeout(name: str, connections: int) -> None:
    grid = Grid.of([5_000_000])
    comm = open_engine("m", connect_timeout_s=60.0, progress_timeout_s=1.0)
    try:
        with peer_process(name, 64.0, "--halt", "SIGSTOP", "--after", "3000000") as victim:
            ports = {"m": comm.port, name: victim.port}
            plan = with_connections(
                plan_for(ports, grid.numel, "fp32", OpId(1, 0), deadline_s=60.0), connections
            )
            victim.begin(plan)
            report = Running(comm, plan, grid, encoded(grid, "fp32", 1.0)).report()
            assert victim.halted(signal.SIGSTOP)
            assert not report.ok
            assert f"no link with {name}.0" in report.reason
            assert {frozenset((edge.source, edge.target)) for edge in report.broken} == {
                frozenset(("m", name))
            }
            assert 1.0 < report.stats.wire_s < 1.0 + SLACK_S
    finally:
        comm.close()


def test_a_member_that_begins_late_but_lives_is_waited_for_beyond_the_progress_timeout() -> None:
    grid = Grid.of([1000])
    with Engines(2, progress_timeout_s=0.4) as engines:
        plan = engines.plan(grid, "fp32", OpId(1, 0))
        first = Running(engines.comms["p0"], plan, grid, encoded(grid, "fp32", 1.0))
        time.sleep(1.2)
        second = Running(engines.comms["p1"], plan, grid, encoded(grid, "fp32", 2.0))
        assert_exact({"p0": first, "p1": second}, 1.5, grid)


def test_a_node_that_only_breathes_is_not_lost() -> None:
    """A raw peer that answers nothing but sends pings itself: the op waits for its data, until its deadline."""
    grid = Grid.of([512])
    comm = open_engine("m", progress_timeout_s=1.0)
    try:
        plan = plan_for({"a": 1, "m": comm.port}, grid.numel, "fp32", OpId(1, 0), deadline_s=3.0)
        running = Running(comm, plan, grid, encoded(grid, "fp32", 1.0))
        raw = RawPeer(comm.port, "a", "m", KEY)
        begin = raw.begin()
        stop = threading.Event()

        def breathe() -> None:
            while not stop.wait(0.05):
                raw.send(Frame(PING, begin.op, 0))

        thread = threading.Thread(target=breathe)
        thread.start()
        try:
            assert "the deadline of 3 s passed" in running.report().reason
        finally:
            stop.set()
            thread.join()
            raw.close()
    finally:
        comm.close()


def test_a_peer_that_is_started_anew_in_the_middle_of_an_op_is_named() -> None:
    """A second raw peer comes with another instance: the first one's credit and data are void."""
    grid = Grid.of([512])
    comm = open_engine("m")
    try:
        plan = plan_for({"a": 1, "m": comm.port}, grid.numel, "fp32", OpId(1, 0))
        running = Running(comm, plan, grid, encoded(grid, "fp32", 1.0))
        first = RawPeer(comm.port, "a", "m", KEY, instance=1)
        first.begin()
        second = RawPeer(comm.port, "a", "m", KEY, instance=2)
        report = running.report()
        assert "a.0 was started anew in the middle of the op" in report.reason
        assert report.broken
        assert first.was_closed()
        assert comm.stats()["connections"] == 1
        first.close()
        second.close()
    finally:
        comm.close()


def test_a_lost_ack_is_made_good_by_a_member_whose_op_has_ended() -> None:
    """The other end of an op that is done here has not heard its last ack: it connects anew and sends again."""
    grid = Grid.of([256])
    with Engines(1) as engines:
        comm = engines.comms["p0"]
        plan = plan_for({"a": 1, "p0": comm.port}, grid.numel, "fp32", OpId(1, 0), roots=["p0"])
        running = Running(comm, plan, grid, encoded(grid, "fp32", 1.0))
        raw = RawPeer(comm.port, "a", "p0", KEY)
        begin = raw.begin()
        ours = replace(begin, kind=CONTRIBUTION, payload=encoded(grid, "fp32", 2.0).tobytes())
        raw.send(ours)
        frames = [raw.read_frame(), raw.read_frame()]
        raw.ack(next(frame for frame in frames if frame.kind == FINISHED))
        assert_exact({"p0": running}, 1.5, grid)
        raw.close()
        again = RawPeer(comm.port, "a", "p0", KEY)
        again.send(replace(begin, plan_digest=begin.plan_digest ^ 1))  # of another plan: no answer
        again.send(begin)
        answer = again.read_frame()
        assert (answer.kind, answer.plan_digest) == (BEGIN, begin.plan_digest)
        assert answer.chunk == 2  # nothing is missing
        again.close()
        np.testing.assert_array_equal(decoded(grid, "fp32", running.result), np.float32(1.5))


def test_a_second_copy_that_is_still_on_its_way_cannot_spoil_a_chunk() -> None:
    """The same chunk comes on two links; the slower copy is damaged after the first one was taken."""
    grid = Grid.of([256])
    with Engines(1) as engines:
        comm = engines.comms["p0"]
        plan = plan_for({"a": 1, "p0": comm.port}, grid.numel, "fp32", OpId(1, 0), roots=["p0"])
        running = Running(comm, with_connections(plan, 2), grid, encoded(grid, "fp32", 1.0))
        first = RawPeer(comm.port, "a", "p0", KEY)
        begin = first.begin()
        second = RawPeer(comm.port, "a", "p0", KEY)
        assert second.read_frame().kind == BEGIN
        ours = replace(begin, kind=CONTRIBUTION, payload=encoded(grid, "fp32", 2.0).tobytes())
        half = len(ours.pack()) // 2
        seen = comm.stats()["received_bytes"]
        second.socket.sendall(ours.pack()[:half])
        until("half a chunk is there", lambda: comm.stats()["received_bytes"] >= seen + half)
        first.send(ours)
        finished = first.read_frame()
        while finished.kind != FINISHED:
            finished = first.read_frame()
        assert finished.payload == encoded(grid, "fp32", 1.5).tobytes()
        second.socket.sendall(bytes(len(ours.pack()) - half))
        assert second.read_frame().kind == ACK_CONTRIBUTION  # dropped, so not even compared
        first.ack(finished)
        assert_exact({"p0": running}, 1.5, grid)
        first.close()
        second.close()


def test_a_chunk_whose_place_went_to_a_copy_that_broke_off_is_asked_for_again() -> None:
    """A chunk comes on one link; half an older copy, on a link that the sender has lost already, is read after its
    header and takes its place, and breaks off. The sender trusts the link that lives: only its loss tells otherwise."""
    grid = Grid.of([256])
    # Without a link the engine dials `a`: a closed port there would say that `a` is gone, and end the op.
    with socket.create_server(("127.0.0.1", 0)) as a, Engines(1) as engines:
        comm = engines.comms["p0"]
        ports = {"a": a.getsockname()[1], "p0": comm.port}
        plan = plan_for(ports, grid.numel, "fp32", OpId(1, 0), roots=["p0"])
        running = Running(comm, with_connections(plan, 2), grid, encoded(grid, "fp32", 1.0))
        lost = RawPeer(comm.port, "a", "p0", KEY)
        begin = lost.begin()
        living = RawPeer(comm.port, "a", "p0", KEY)
        assert living.read_frame().kind == BEGIN
        ours = replace(begin, kind=CONTRIBUTION, payload=encoded(grid, "fp32", 2.0).tobytes())
        half = len(ours.pack()) // 2
        for raw in (living, lost):
            seen = comm.stats()["received_bytes"]
            raw.socket.sendall(ours.pack()[:half])
            until("half a chunk is there", lambda seen=seen: comm.stats()["received_bytes"] >= seen + half)
        lost.close()
        until("the engine sees its end", lambda: comm.stats()["broken_links"] == 1)
        living.socket.sendall(ours.pack()[half:])
        assert living.was_closed(), "nobody would ever send the chunk again"
        again = RawPeer(comm.port, "a", "p0", KEY)
        assert again.read_frame().kind == BEGIN
        again.send(ours)
        finished = again.read_frame()
        while finished.kind != FINISHED:
            finished = again.read_frame()
        again.ack(finished)
        assert_exact({"p0": running}, 1.5, grid)
        for raw in (living, again):
            raw.close()


def test_more_connections_than_sockets_are_refused_in_one_line_with_the_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Engines(3) as engines:
        grid = Grid.of([1000])
        plan = with_connections(engines.plan(grid, "fp32", OpId(1, 0)), 64)
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
        try:
            report = engines.comms["p0"].reduce(
                plan, grid, encoded(grid, "fp32", 1.0), encoded(grid, "fp32", 0.0)
            )
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert not report.ok
        assert "128 sockets; this process may open 128 files (ulimit -n)" in report.reason
        assert "\n" not in report.reason
        too_many = with_connections(engines.plan(grid, "fp32", OpId(1, 1)), 65)
        report = engines.comms["p0"].reduce(
            too_many, grid, encoded(grid, "fp32", 1.0), encoded(grid, "fp32", 0.0)
        )
        assert "connections is 65; it must be 1 to 64" in report.reason


def test_an_unknown_congestion_control_is_refused_with_the_list() -> None:
    with pytest.raises(
        ValueError, match=r'congestion control "mumble" is not to be had .*this system has: .*reno'
    ):
        open_engine("p0", congestion="mumble")
    open_engine("p0", congestion="reno").close()
