"""What links carry: kept below a limit, measured in passing, and probed."""

from __future__ import annotations

import threading
import time

import pytest

from atoll import _native
from atoll.comm.native import NativeCommunicator
from atoll.plan.grid import Grid
from atoll.values import OpId, ReduceReport
from support import engines
from support.engines import KEY, Engines, Running, encoded, open_engine
from support.raw_peer import PROBE, RawPeer
from support.slack import SLACK_S

GRID = Grid.of([1_000_000])  # 4 MB in fp32: 4 MB each way between two
pytestmark = pytest.mark.usefixtures("stream")


def reduce(both: Engines, op: OpId, connections: int) -> dict[str, ReduceReport]:
    running = both.begin(both.plan(GRID, "fp32", op, connections=connections), GRID)
    reports = {peer: one.report() for peer, one in running.items()}
    assert all(report.ok for report in reports.values()), reports
    return reports


@pytest.mark.parametrize("connections", [1, 4])
@pytest.mark.parametrize("which", ["max_up_bytes_per_s", "max_down_bytes_per_s"])
def test_a_limit_holds_over_all_links_together(which: str, connections: int) -> None:
    """4 MB at 4 MB/s: no sooner than in a second; bursts are 50 ms of the rate."""
    with Engines(2, **{which: 4e6}) as both:
        for round_ in range(2):
            for report in reduce(both, OpId(1, round_), connections).values():
                print(f"{which}, {connections} links: {4e6 / report.stats.wire_s / 4e6:.3f} of the limit")
                assert 0.9 < report.stats.wire_s < 1.0 + SLACK_S


def test_an_abort_does_not_wait_for_the_limit() -> None:
    with Engines(2, max_up_bytes_per_s=1e5) as both:
        plan = both.plan(GRID, "fp32", OpId(1, 0))
        running = both.begin(plan, GRID)
        time.sleep(0.3)
        begin = time.monotonic()
        for comm in both.comms.values():
            comm.abort(plan.op)
        assert all(one.report().reason == "aborted" for one in running.values())
        assert time.monotonic() - begin < 0.1 + SLACK_S  # all of it would take 40 s


def test_a_report_tells_what_each_direction_carried() -> None:
    with Engines(3, max_up_bytes_per_s=8e6) as three:
        for peer, report in reduce(three, OpId(1, 0), 2).items():
            others = {other for other in three.comms if other != peer}
            rates = {(link.source, link.target): link for link in report.stats.links}
            wanted = {(peer, other) for other in others} | {(other, peer) for other in others}
            assert rates.keys() == wanted | {(peer, ""), ("", peer)}
            # A cap holds over an op; acks that waited for a busy processor come together, and look faster.
            uplink = rates[peer, ""].bytes_per_s
            assert 0.2 * 8e6 < uplink < 1.5 * 8e6
            for other in others:
                assert 0 < rates[peer, other].bytes_per_s < 1.5 * 8e6
                assert 0 < rates[peer, other].rtt_s < 1.0


def test_too_little_data_tells_no_rate() -> None:
    grid = Grid.of([1000])
    with Engines(2) as both:
        running = both.begin(both.plan(grid, "fp32", OpId(1, 0)), grid)
        assert all(one.report().stats.links == () for one in running.values())


def raw_engine(peer: str, **options: float) -> _native.Engine:
    tls = engines.TLS
    return _native.Engine(
        run="test",
        peer=peer,
        rank=0,
        session_key=KEY,
        bind_host="127.0.0.1",
        port=0,
        connect_timeout_s=5.0,
        num_workers=1,
        tls_certificates=tls.certificates if tls else "",
        tls_key=tls.key if tls else "",
        tls_authorities=tls.authorities if tls else "",
        **options,  # type: ignore[arg-type]
    )


def until_linked(comm: NativeCommunicator) -> None:
    """An op that was handed to a thread has begun: it has made a link."""
    deadline_s = time.monotonic() + 5.0 + SLACK_S
    while comm.stats()["connections"] == 0:
        assert time.monotonic() < deadline_s, "the op makes no link"
        time.sleep(0.005)


@pytest.mark.parametrize("connections", [1, 3])
def test_a_probe_measures_the_links_to_several_nodes(connections: int) -> None:
    prober = raw_engine("a", max_up_bytes_per_s=4e6)
    others = [raw_engine(name) for name in ("b", "c")]
    try:
        nodes = [(name, 0, "127.0.0.1", one.port) for name, one in zip("bc", others, strict=True)]
        for _ in range(2):
            results = prober.probe(nodes, 1 << 20, 10.0, connections)
            for rate, rtt_s, failure in results:
                assert failure == ""
                assert 0.2e6 < rate < 1.5 * 4e6
                assert 0 < rtt_s < 1.0
        assert prober.stats()["connections"] == 2 * connections
        assert all(one.stats()["dropped_frames"] == 0 for one in others)
    finally:
        for one in (prober, *others):
            one.close()


def test_a_probe_waits_for_ops_and_for_nobody_else() -> None:
    grid = Grid.of([1000])
    with Engines(2) as both:
        comm, port = both.comms["p0"], both.ports["p1"]
        plan = both.plan(grid, "fp32", OpId(1, 0))
        half = Running(comm, plan, grid, encoded(grid, "fp32", 1.0))  # p1 does not begin: it stays open
        until_linked(comm)
        begin = time.monotonic()
        ((rate, _, failure),) = comm._engine.probe([("p1", 0, "127.0.0.1", port)], 1 << 20, 0.5)
        assert (rate, failure) == (0, "too few answers by the deadline")
        assert time.monotonic() - begin < 0.5 + SLACK_S
        comm.abort(plan.op)
        assert not half.report().ok
        ((rate, _, failure),) = comm._engine.probe([("p1", 0, "127.0.0.1", port)], 1 << 20, 5.0)
        assert rate > 0
        assert failure == ""


def test_a_probe_ends_when_an_op_begins() -> None:
    """It would take ten seconds; the op that begins meanwhile does not share its links with it."""
    with Engines(2, max_up_bytes_per_s=1e5) as both:
        comm, port = both.comms["p0"], both.ports["p1"]
        found: list[tuple[float, float, str]] = []
        probe = threading.Thread(
            target=lambda: found.extend(comm._engine.probe([("p1", 0, "127.0.0.1", port)], 1 << 20, 10.0))
        )
        probe.start()
        deadline_s = time.monotonic() + 5.0 + SLACK_S
        while comm.stats()["sent_bytes"] < 64 << 10:
            assert time.monotonic() < deadline_s, "the probe sends nothing"
            time.sleep(0.005)
        running = both.begin(both.plan(Grid.of([1000]), "fp32", OpId(1, 0)), Grid.of([1000]))
        probe.join(SLACK_S)
        assert found == [(0.0, 0.0, "an op began before it was measured")]
        assert all(one.report().ok for one in running.values())


def test_who_is_in_an_op_answers_no_probe() -> None:
    grid = Grid.of([1000])
    with Engines(2) as both:
        prober = raw_engine("a")
        try:
            plan = both.plan(grid, "fp32", OpId(1, 0))
            half = Running(both.comms["p1"], plan, grid, encoded(grid, "fp32", 1.0))  # p0 does not begin
            until_linked(both.comms["p1"])
            target = [("p1", 0, "127.0.0.1", both.ports["p1"])]
            ((rate, _, failure),) = prober.probe(target, 1 << 20, 0.5)
            assert (rate, failure) == (0, "too few answers by the deadline")
            both.comms["p1"].abort(plan.op)
            assert not half.report().ok
            ((rate, _, failure),) = prober.probe(target, 1 << 20, 5.0)
            assert (rate > 0, failure) == (True, "")
        finally:
            prober.close()


def test_a_slow_link_is_measured_by_what_it_answered_in_time() -> None:
    prober, other = raw_engine("a", max_up_bytes_per_s=1e6), raw_engine("b")
    try:
        ((rate, _, failure),) = prober.probe([("b", 0, "127.0.0.1", other.port)], 1 << 30, 1.0)
        assert failure == ""
        assert 0.2e6 < rate < 1.5e6
    finally:
        prober.close()
        other.close()


def test_a_probe_that_nobody_answers_sends_little() -> None:
    """What is on its way when a round begins is in that round's way."""
    prober = raw_engine("b")
    silent = RawPeer(prober.port, "a", "b", KEY)
    silent.socket.settimeout(0.2)
    try:
        ((_, _, failure),) = prober.probe([("a", 0, "127.0.0.1", 1)], 4 << 20, 0.5)
        assert failure == "too few answers by the deadline"
        assert len([frame for frame in silent.read_frames() if frame.kind == PROBE]) == 4
    finally:
        silent.close()
        prober.close()


def test_a_probe_of_nobody_says_why() -> None:
    prober = raw_engine("a")
    gone = open_engine("b")
    port = gone.port
    gone.close()
    try:
        ((rate, _, failure),) = prober.probe([("b", 0, "127.0.0.1", port)], 1 << 20, 10.0)
        assert rate == 0
        assert f"could not connect to 127.0.0.1 port {port}" in failure
        with pytest.raises(ValueError, match="a node cannot probe itself"):
            prober.probe([("a", 0, "127.0.0.1", 1)], 1 << 20, 1.0)
        with pytest.raises(ValueError, match="bytes and a deadline above 0"):
            prober.probe([("b", 0, "127.0.0.1", 1)], 1 << 20, 0.0)
    finally:
        prober.close()


def test_limits_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        open_engine("a", max_up_bytes_per_s=-1.0)
