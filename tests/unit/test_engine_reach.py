"""Engines find each other: at one of several addresses, by the other end's call, and in trials of their own."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from atoll.comm.native import NativeCommunicator
from atoll.comm.prober import ProbeOrder, Prober, ReachOrder
from atoll.plan.grid import Grid
from atoll.values import OpId, Plan, Range, RankInfo, ReduceReport
from support.engines import Running, encoded, open_engine, plan_for
from support.slack import SLACK_S

GRID = Grid.of([1000])
pytestmark = pytest.mark.usefixtures("stream")


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Takes connections and says nothing on them."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield int(silent.getsockname()[1])


@pytest.fixture
def pair() -> Iterator[dict[str, NativeCommunicator]]:
    comms = {name: open_engine(name) for name in "ab"}
    yield comms
    for comm in comms.values():
        comm.close()


def plan_at(infos: dict[str, RankInfo], op: OpId) -> Plan:
    plan = plan_for({name: info.port for name, info in infos.items()}, GRID.numel, "fp32", op)
    return replace(
        plan, ranks={name: (replace(info, ranges=(Range(0, GRID.numel),)),) for name, info in infos.items()}
    )


def reduce(
    comms: dict[str, NativeCommunicator], infos: dict[str, RankInfo], number: int = 0
) -> dict[str, ReduceReport]:
    plan = plan_at(infos, OpId(1, number))
    running = {name: Running(comm, plan, GRID, encoded(GRID, "fp32", 1.0)) for name, comm in comms.items()}
    return {name: one.report() for name, one in running.items()}


def test_a_closed_port_is_not_the_last_word_before_the_other_end_had_its_turn(
    pair: dict[str, NativeCommunicator], closed_port: int
) -> None:
    """As a router does that refuses for what is behind it: the lower name's dial is refused, the other one's is not."""
    infos = {"a": RankInfo("127.0.0.1", pair["a"].port, ()), "b": RankInfo("127.0.0.1", closed_port, ())}
    reports = reduce(pair, infos)
    assert all(report.ok for report in reports.values()), reports
    assert pair["a"].stats()["dialled_links"] == 0
    assert pair["b"].stats()["dialled_links"] == 1
    with socket.socket() as outside:
        assert outside.connect_ex(("127.0.0.1", closed_port)) != 0, "nobody listens there"


def test_an_op_finds_a_peer_at_one_of_its_addresses(
    pair: dict[str, NativeCommunicator], closed_port: int, silent_port: int
) -> None:
    """None is right for both: each has a refused one and a silent one before its own."""
    infos = {
        name: RankInfo(
            "127.0.0.1", closed_port, (), more_hosts=(f"127.0.0.1:{silent_port}", f"127.0.0.1:{comm.port}")
        )
        for name, comm in pair.items()
    }
    for number in range(3):
        reports = reduce(pair, infos, number)
        assert all(report.ok for report in reports.values()), reports
    assert pair["a"].stats()["dialled_links"] + pair["b"].stats()["dialled_links"] == 1


def test_trials_name_the_address_that_answered_or_those_that_did_not(
    pair: dict[str, NativeCommunicator], closed_port: int
) -> None:
    port = pair["b"].port
    where, failed = pair["a"].reach(
        {"b": RankInfo("127.0.0.1", port, ()), "c": RankInfo("127.0.0.1", closed_port, ())}, 5.0
    )
    assert where == {"b": f"127.0.0.1 port {port}"}
    assert f"could not connect to 127.0.0.1 port {closed_port}" in failed["c"]
    assert pair["b"].reach({"a": RankInfo("127.0.0.1", pair["a"].port, ())}, 5.0)[1] == {}
    _, failed = pair["a"].reach({"a": RankInfo("127.0.0.1", 1, ())}, 5.0)
    assert "itself" in failed["a"]


def test_another_peers_engine_at_an_address_is_not_the_one_that_is_meant(
    pair: dict[str, NativeCommunicator],
) -> None:
    """Two homes with the same private addresses: what answers there is somebody else."""
    where, failed = pair["a"].reach({"c": RankInfo("127.0.0.1", pair["b"].port, ())}, 5.0)
    assert where == {}
    assert f"127.0.0.1 port {pair['b'].port}" in failed["c"]


class Slow:
    """A stand-in for the engine: its first measurement lasts until it is released."""

    def __init__(self) -> None:
        self.released, self.began = threading.Event(), threading.Event()
        self.done: list[str] = []

    def probe(self, peer: str, *more: Any) -> tuple[float, float, str]:
        self.began.set()
        self.released.wait(30.0)
        self.done.append(f"measured {peer}")
        return 1.0, 0.1, ""

    def reach(self, targets: Mapping[str, RankInfo], trial_s: float) -> tuple[dict[str, str], dict[str, str]]:
        self.done.append(f"dialled {','.join(targets)}")
        return dict.fromkeys(targets, "somewhere"), {}


def test_trials_come_before_measurements_that_wait() -> None:
    engine, told = Slow(), queue.Queue[Any]()
    prober = Prober("a", engine, lambda *found: told.put(found), lambda *found: told.put(found))  # type: ignore[arg-type]
    info = RankInfo("host", 1, ())
    prober.begin(ProbeOrder({"b": info}, 1, 1, 1.0))
    assert engine.began.wait(10.0 + SLACK_S)
    prober.begin(ProbeOrder({"c": info}, 1, 1, 1.0))
    prober.begin(ReachOrder({"d": info}, 1.0))
    engine.released.set()
    found = [told.get(timeout=10.0 + SLACK_S) for _ in range(3)]
    assert engine.done == ["measured b", "dialled d", "measured c"]
    assert found[1] == ({"d": "somewhere"}, {})
    prober.close()


def test_trials_come_between_the_measurements_of_one_order() -> None:
    """A round waits for trials: not for eight measurements of a second each as well."""
    engine, told = Slow(), queue.Queue[Any]()
    prober = Prober("a", engine, lambda *found: told.put(found), lambda *found: told.put(found))  # type: ignore[arg-type]
    info = RankInfo("host", 1, ())
    prober.begin(ProbeOrder({"b": info, "c": info}, 1, 1, 1.0))
    assert engine.began.wait(10.0 + SLACK_S)
    prober.begin(ProbeOrder({"f": info}, 1, 1, 1.0))
    prober.begin(ReachOrder({"d": info}, 1.0))
    prober.begin(ReachOrder({"e": info}, 1.0))
    engine.released.set()
    found = [told.get(timeout=10.0 + SLACK_S) for _ in range(4)]
    assert engine.done == ["measured b", "dialled d", "dialled e", "measured c", "measured f"]
    assert found[:2] == [({each: "somewhere"}, {}) for each in "de"]
    assert [link.target for link in found[2][0]] == ["b", "c"], "what was measured is told together"
    prober.close()
