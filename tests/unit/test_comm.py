"""The adapters: the same contract by sockets, in one process, and with faults on purpose."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from atoll.codecs import reference
from atoll.comm.base import Communicator
from atoll.comm.faulty import FailAttempt, Faulty, FlipBit
from atoll.comm.loopback import LoopbackCommunicator, LoopbackHub
from atoll.comm.native import expand
from atoll.plan.grid import Grid
from atoll.plan.routes import routing_of
from atoll.values import CODECS, Contribution, Edge, Lane, NodeId, OpId, Plan, Range, RankInfo
from support.engines import Engines, Running, decoded, encoded, plan_for
from support.slack import SLACK_S

GRID = Grid.of([300, 1, 7])


def hub_of(world: int) -> dict[str, Communicator]:
    hub = LoopbackHub()
    return {f"p{i}": LoopbackCommunicator(hub, f"p{i}") for i in range(world)}


def plan(comms: dict[str, Communicator], op: OpId, **options: object) -> Plan:
    return plan_for({peer: comm.port for peer, comm in comms.items()}, GRID.numel, "fp32", op, **options)  # type: ignore[arg-type]


# ---- native ----


def test_a_plan_with_several_ranks_joins_those_that_own_the_same() -> None:
    """Of 12 elements in two parameters, a and c are cut in two, b in three."""
    grid = Grid.of([6, 6])
    cuts = {"a": [(0, 3, 6, 9), (3, 6, 9, 12)], "b": [(0, 2, 6, 8), (2, 4, 8, 10), (4, 6, 10, 12)]}
    cuts["c"] = cuts["a"]
    ranks = {
        peer: tuple(
            RankInfo(peer, 10 * number, (Range(*own[:2]), Range(*own[2:]))) for number, own in enumerate(cut)
        )
        for peer, cut in cuts.items()
    }
    two_each = Plan(
        op=OpId(1, 0),
        base_version=0,
        members=("a", "b", "c"),
        contributions=(Contribution("a", 2), Contribution("c", 1)),
        ranks=ranks,
        lanes=(Lane("b"), Lane("c")),
        codec="fp32",
        deadline_s=1.0,
    )
    routing = routing_of(two_each, grid)
    assert routing.routes == ((0, 0, 0), (0, 1, 0), (1, 1, 1), (1, 2, 1))
    assert routing.cuts.tolist() == [0, 4, 6, 8, 12]
    expansion = expand(two_each, routing)
    assert [str(node) for node in expansion.nodes] == ["a.0", "a.1", "b.0", "b.1", "b.2", "c.0", "c.1"]
    assert expansion.addresses[3] == ("b", 10)
    index = {node: position for position, node in enumerate(expansion.nodes)}
    lanes = iter(expansion.lanes)
    for route in routing.routes:
        owners = dict(
            zip("abc", [index[NodeId(*each)] for each in zip("abc", route, strict=True)], strict=True)
        )
        for root in ("b", "c"):
            star = [owners[root] if node in owners.values() else -1 for node in range(7)]
            assert next(lanes) == (owners[root], [owners["a"], owners["c"]], [2, 1], star, star)
    assert next(lanes, None) is None
    with pytest.raises(ValueError, match="'a' has no rank 2"):
        routing.part("a", 2)


def test_a_signal_between_the_report_and_its_reader_is_no_other_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine has forgotten the op once it has reported; a goodbye must not become "op is not running here"."""
    with Engines(2) as engines:
        comm = engines.comms["p0"]
        plan = engines.plan(GRID, "fp32", OpId(1, 0))

        class Interrupted:
            def __init__(self, engine: Any) -> None:
                self._engine = engine
                self.interrupted = False

            def __getattr__(self, name: str) -> Any:
                return getattr(self._engine, name)

            def wait(self, op: tuple[int, int, int, int], timeout_s: float) -> object:
                found = self._engine.wait(op, timeout_s)
                if found is not None and not self.interrupted:
                    self.interrupted = True
                    raise KeyboardInterrupt
                return found

        monkeypatch.setattr(comm, "_engine", Interrupted(comm._engine))
        other = engines.comms["p1"]
        running = Running(other, plan, GRID, encoded(GRID, "fp32", 1.0))
        with pytest.raises(KeyboardInterrupt):
            comm.reduce(plan, GRID, encoded(GRID, "fp32", 2.0), np.empty(GRID.wire_bytes("fp32"), np.uint8))
        running.report()


def test_hosts_may_be_names() -> None:
    with Engines(2) as engines:
        by_number = engines.plan(GRID, "fp32", OpId(1, 0))
        own = by_number.ranks["p0"][0].ranges
        ranks = {peer: (RankInfo("localhost", port, own),) for peer, port in engines.ports.items()}
        for result in engines.reduce(msgspec.structs.replace(by_number, ranks=ranks), GRID):
            np.testing.assert_array_equal(decoded(GRID, "fp32", result), np.float32(1.5))


# ---- loopback ----


@pytest.mark.parametrize("codec", CODECS)
def test_loopback_and_engine_give_the_same_bits(codec: str) -> None:
    seed = 77
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    values = {f"p{i}": rng.standard_normal(GRID.numel).astype(np.float32) for i in range(3)}
    weights = {"p0": 5, "p1": 1, "p2": 3}
    with Engines(3) as engines:
        by_engine = engines.reduce(engines.plan(GRID, codec, OpId(1, 0), weights=weights), GRID, values)
    comms = hub_of(3)
    shared = plan_for(dict.fromkeys(comms, 0), GRID.numel, codec, OpId(1, 0), weights=weights)
    running = [Running(comms[p], shared, GRID, encoded(GRID, codec, value)) for p, value in values.items()]
    contributions = [encoded(GRID, codec, value) for value in values.values()]
    expected = reference.weighted_mean(codec, GRID.segments, contributions, list(weights.values()))
    for one, other in zip(running, by_engine, strict=True):
        assert one.report().ok
        np.testing.assert_array_equal(one.result, other)
        np.testing.assert_array_equal(one.result, expected)


def test_loopback_serves_several_ops_at_once_and_members_that_only_receive() -> None:
    comms = hub_of(3)
    plans = [plan(comms, OpId(1, 0, fragment), weights={f"p{fragment}": 1}) for fragment in range(3)]
    running = {
        (p.op.fragment, peer): Running(
            comm,
            p,
            GRID,
            encoded(GRID, "fp32", float(p.op.fragment)) if peer == f"p{p.op.fragment}" else None,
        )
        for p in plans
        for peer, comm in comms.items()
    }
    for (fragment, _), one in running.items():
        assert one.report().ok
        np.testing.assert_array_equal(decoded(GRID, "fp32", one.result), np.float32(fragment))


def test_loopback_names_who_is_missing_at_the_deadline_and_is_usable_afterwards() -> None:
    comms = hub_of(3)
    late = plan(comms, OpId(1, 0), deadline_s=2.0)  # time enough for both to arrive
    begin = time.monotonic()
    running = {peer: Running(comms[peer], late, GRID, encoded(GRID, "fp32", 1.0)) for peer in ("p0", "p1")}
    report = running["p0"].report()
    assert time.monotonic() - begin < 2.0 + SLACK_S
    assert not report.ok
    assert report.broken == (Edge("p2", "p0"), Edge("p0", "p2"))
    assert "the deadline of 2 s passed; still missing: p2" in report.reason
    assert not running["p1"].report().ok

    again = plan(comms, OpId(1, 0, 0, 1))
    for one in [Running(comm, again, GRID, encoded(GRID, "fp32", 1.0)) for comm in comms.values()]:
        assert one.report().ok


def test_loopback_aborts_from_another_thread_and_before_the_beginning() -> None:
    comms = hub_of(2)
    waiting = Running(comms["p0"], plan(comms, OpId(1, 0)), GRID, encoded(GRID, "fp32", 1.0))
    time.sleep(0.05)
    threading.Thread(target=comms["p0"].abort, args=(OpId(1, 0),)).start()
    assert waiting.report().reason == "aborted"
    comms["p0"].abort(OpId(1, 1))
    report = comms["p0"].reduce(plan(comms, OpId(1, 1)), GRID, None, np.empty(4 * GRID.numel, dtype=np.uint8))
    assert "was used or aborted before" in report.reason


def test_loopback_tells_different_plans_apart() -> None:
    comms = hub_of(2)
    first = Running(comms["p0"], plan(comms, OpId(1, 0)), GRID, encoded(GRID, "fp32", 1.0))
    time.sleep(0.05)
    other = plan(comms, OpId(1, 0), weights={"p0": 1, "p1": 2})
    second = Running(comms["p1"], other, GRID, encoded(GRID, "fp32", 1.0))
    assert "p1 holds another plan" in first.report().reason
    assert not second.report().ok


def test_loopback_refuses_a_mean_that_is_not_finite() -> None:
    comms = hub_of(1)
    damaged = encoded(GRID, "fp32", 1.0)
    damaged.view(np.float32)[0] = np.inf
    report = Running(comms["p0"], plan(comms, OpId(1, 0)), GRID, damaged).report()
    assert not report.ok
    assert "not finite" in report.reason


# ---- faulty ----


def test_a_flipped_bit_enters_the_sum_and_leaves_the_callers_buffer_alone() -> None:
    comms = hub_of(1)
    sign = 8 * (4 * 10 + 3) + 7
    faulty = Faulty(comms["p0"], {OpId(1, 1): FlipBit(bit=sign)})
    contribution = encoded(GRID, "fp32", 1.0)
    before = contribution.copy()
    for round_ in range(2):
        running = Running(faulty, plan(comms, OpId(1, round_)), GRID, contribution)
        assert running.report().ok
        expected = np.ones(GRID.numel, dtype=np.float32)
        expected[10] = -1.0 if round_ == 1 else 1.0
        np.testing.assert_array_equal(decoded(GRID, "fp32", running.result), expected)
    assert faulty.fired == [OpId(1, 1)]
    np.testing.assert_array_equal(contribution, before)


def test_a_failed_attempt_names_its_edges_and_the_next_one_succeeds() -> None:
    with Engines(2) as engines:
        edge = Edge("p0", "p1")
        faulty = Faulty(engines.comms["p0"], {OpId(1, 0): FailAttempt(broken=(edge,))})
        first = engines.plan(GRID, "fp32", OpId(1, 0), deadline_s=1.0)
        healthy = Running(engines.comms["p1"], first, GRID, encoded(GRID, "fp32", 1.0))
        report = Running(faulty, first, GRID, encoded(GRID, "fp32", 1.0)).report()
        assert faulty.fired == [first.op]
        assert (report.ok, report.broken) == (False, (edge,))
        assert not healthy.report().ok

        second = engines.plan(GRID, "fp32", OpId(1, 0, 0, 1))
        healthy = Running(engines.comms["p1"], second, GRID, encoded(GRID, "fp32", 1.0))
        assert Running(faulty, second, GRID, encoded(GRID, "fp32", 1.0)).report().ok
        assert healthy.report().ok
        assert faulty.fired == [first.op]
