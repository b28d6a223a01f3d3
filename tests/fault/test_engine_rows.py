"""The engine, in real processes, under each fault of a list that other systems are known to fail.

Each test is named after what happens; each asserts first that it did happen. Contributions are distinct powers of two.
"""

from __future__ import annotations

import signal
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from atoll.plan.lanes import direct_lanes
from atoll.values import Edge, Lane, OpId, Plan
from support.fault_crew import FaultCrew
from support.fault_peer import Done
from support.proxy import DOWN, UP, Fault, Pair
from support.raw_peer import CONTRIBUTION, FINISHED, FRAME_BYTES, HELLO_BYTES, PROOF_BYTES
from support.slack import SLACK_S

pytestmark = pytest.mark.fault

NUMEL = 1_000_000
"""Those that hit in the middle take four times as many: a busy machine may be late with a signal."""
THREE = ("p0", "p1", "p2")


@pytest.fixture(scope="module")
def crew() -> Iterator[FaultCrew]:
    with FaultCrew(4) as crew:
        yield crew


@pytest.fixture
def op(crew: FaultCrew) -> Iterator[OpId]:
    """The first attempt of a fresh round. Afterwards links are well again, and all peers are there."""
    yield OpId(1, crew.next_round())
    crew.recover()


def commit(crew: FaultCrew, op: OpId, members: tuple[str, ...] | list[str], **options: object) -> Plan:
    """An attempt in which nothing goes wrong: everybody holds the exact mean."""
    plan = crew.begin(op, members, numel=NUMEL, deadline_s=10.0, **options)
    for name, done in crew.ends(plan, members).items():
        assert done.report.ok, f"{name}: {done.report.reason}"
        assert done.values == (crew.mean_of(plan),)
    return plan


def following(op: OpId) -> OpId:
    return replace(op, attempt=op.attempt + 1)


def edges(a: str, b: str) -> set[Edge]:
    return {Edge(a, b), Edge(b, a)}


def failed(ends: dict[str, Done]) -> dict[str, Done]:
    return {name: done for name, done in ends.items() if not done.report.ok}


def test_row_1_killed_while_contributions_travel(crew: FaultCrew, op: OpId) -> None:
    plan = crew.begin(op, crew.names, {"p3": ("SIGKILL", 600_000)}, numel=4 * NUMEL)
    ends = crew.ends(plan, THREE)
    assert crew.peers["p3"].suffered(signal.SIGKILL)
    assert failed(ends).keys() == set(THREE)  # it was needed by all
    for name, done in ends.items():
        assert set(done.report.broken) <= edges(name, "p3"), done.report
        assert done.seconds < 1.0 + SLACK_S
    assert any(done.report.broken for done in ends.values())
    commit(crew, following(op), THREE)


def test_row_2_killed_after_some_have_finished(crew: FaultCrew, op: OpId) -> None:
    """p3 sums; all but p1 have its result when it dies. Retried, nobody's earlier result enters the sum."""
    commit(crew, op, crew.names)
    op = OpId(1, crew.next_round())
    fault = Fault("stall", after=5_000, directions=(DOWN,))
    crew.proxy("p1", "p3").arm(fault)
    plan = crew.begin(op, crew.names, numel=NUMEL, lanes=[Lane("p3")], deadline_s=10.0)
    for name in ("p0", "p2"):
        done = crew.peers[name].done(op, 10.0)
        assert done.report.ok, done.report.reason
        assert done.values == (crew.mean_of(plan),)
    assert fault.fired.is_set()
    crew.peers["p3"].send(signal.SIGKILL)
    assert crew.peers["p3"].suffered(signal.SIGKILL)
    crew.proxy("p1", "p3").reset()
    late = crew.peers["p1"].done(op, 10.0 + SLACK_S)
    assert not late.report.ok
    assert late.report.broken
    assert set(late.report.broken) <= edges("p1", "p3")
    commit(crew, following(op), THREE)


def test_row_8_frozen_in_an_all_reduce_then_thawed(crew: FaultCrew, op: OpId) -> None:
    """Found by the attempt's deadline; the thawed peer's old attempt ends without a wrong result, then it is healed."""
    plan = crew.begin(op, crew.names, {"p1": ("SIGSTOP", 600_000)}, numel=4 * NUMEL, deadline_s=2.0)
    others = ("p0", "p2", "p3")
    ends = crew.ends(plan, others)
    assert crew.peers["p1"].suffered(signal.SIGSTOP)
    assert failed(ends)
    for name, done in failed(ends).items():
        assert set(done.report.broken) <= edges(name, "p1"), done.report
        assert done.seconds < plan.deadline_s + SLACK_S
    commit(crew, following(op), others)
    crew.peers["p1"].send(signal.SIGCONT)
    thawed = crew.peers["p1"].done(op, plan.deadline_s + SLACK_S)
    assert not thawed.report.ok
    commit(crew, OpId(1, crew.next_round()), crew.names)


@pytest.mark.parametrize("after", [0, 200_000], ids=["from the start", "in the middle"])
def test_row_12_one_cannot_reach_another(crew: FaultCrew, op: OpId, after: int) -> None:
    """p0 to p2 is cut, nothing else: all contributions are committed in the next attempt, by lanes that avoid it."""
    fault = Fault("cut", after=after, directions=(UP,))
    crew.proxy("p0", "p2").reset()
    crew.proxy("p0", "p2").arm(fault)
    plan = crew.begin(op, THREE, numel=NUMEL, deadline_s=2.0)
    ends = crew.ends(plan, THREE)
    assert fault.fired.is_set()
    broken = {edge for done in failed(ends).values() for edge in done.report.broken}
    assert broken == edges("p0", "p2")
    lanes = direct_lanes(THREE, broken)
    assert [lane.root for lane in lanes] == ["p1"]
    commit(crew, following(op), THREE, lanes=lanes)


@pytest.mark.parametrize("at", [200_000, 333_333, 1_234_567])
def test_row_24_a_bit_flips_on_the_wire(crew: FaultCrew, op: OpId, at: int) -> None:
    """At the given byte of a link, wherever in a frame that is."""
    fault = Fault("flip", after=at, directions=(UP,))
    crew.proxy("p0", "p1").arm(fault)
    before = crew.peers["p1"].holds().stats["broken_links"]
    plan = crew.begin(op, ("p0", "p1"), numel=NUMEL, deadline_s=5.0)
    ends = crew.ends(plan, ("p0", "p1"))
    assert fault.fired.is_set()
    assert crew.peers["p1"].holds().stats["broken_links"] > before, "p1 took damaged bytes"
    for done in ends.values():  # the chunk was sent again over another link, or the attempt failed
        if done.report.ok:
            assert done.values == (crew.mean_of(plan),)
        else:
            assert set(done.report.broken) <= edges("p0", "p1")
    commit(crew, following(op), ("p0", "p1"))


def test_row_25_other_shapes_counts_or_types(crew: FaultCrew, op: OpId) -> None:
    """Each pair that differs is told so on both sides, at once; nobody waits for the deadline."""
    for attempt, what in enumerate(("shapes", "count", "codec")):
        op = replace(op, attempt=attempt)
        plans = {name: crew.plan(name, op, THREE, numel=NUMEL, deadline_s=20.0) for name in THREE}
        sizes: tuple[int, ...] = ()
        if what == "shapes":
            sizes = (NUMEL // 2 + 1, NUMEL // 2 - 1)  # blocks begin elsewhere
        elif what == "count":
            plans["p2"] = crew.plan("p2", op, THREE, numel=NUMEL + 1, deadline_s=20.0)
        else:
            plans["p2"] = replace(plans["p2"], codec="int8")
        for name, plan in plans.items():
            crew.give(name, plan, sizes=sizes if name == "p2" else ())
        ends = crew.ends(plans["p0"], THREE)
        assert failed(ends).keys() == set(THREE), what
        told = {done.report.reason for done in ends.values() if "aborted" not in done.report.reason}
        assert told, what
        assert all("holds another plan" in reason for reason in told), told
        assert all(done.seconds < 5.0 + SLACK_S for done in ends.values())
    commit(crew, replace(op, attempt=3), THREE)


def test_row_28_the_same_op_twice(crew: FaultCrew, op: OpId) -> None:
    """The second use of an op's name is refused, while the first runs and after it, and changes nothing."""
    fault = Fault("slow", directions=(UP, DOWN), bytes_per_s=8e6)
    crew.proxy("p0", "p1").arm(fault)
    plan = crew.begin(op, ("p0", "p1"), numel=NUMEL, deadline_s=10.0)
    end = time.monotonic() + 5.0 + SLACK_S
    while crew.proxy("p0", "p1").moved[UP] == 0:  # until p0 has begun
        assert time.monotonic() < end
        time.sleep(0.002)
    crew.give("p0", crew.plan("p0", op, ("p0", "p1"), numel=NUMEL), scale=1024.0)
    second, first = crew.peers["p0"].done(op, 5.0 + SLACK_S), crew.peers["p0"].done(op, 10.0 + SLACK_S)
    assert fault.fired.is_set()
    assert not second.report.ok
    assert f"op {op}" in second.report.reason
    assert first.values == crew.peers["p1"].done(op, 10.0).values == (crew.mean_of(plan),)
    crew.give("p1", crew.plan("p1", op, ("p0", "p1"), numel=NUMEL), scale=1024.0)
    again = crew.peers["p1"].done(op, 5.0 + SLACK_S)
    assert not again.report.ok
    commit(crew, following(op), ("p0", "p1"))


def test_row_38_members_disagree_on_who_takes_part(crew: FaultCrew, op: OpId) -> None:
    """Two have a plan of two, one has a plan of three, under one name: nobody gets a mean of the wrong world."""
    pair, all_three = ("p0", "p1"), THREE
    for name in pair:
        crew.give(name, crew.plan(name, op, pair, numel=NUMEL, deadline_s=3.0))
    wide = crew.plan("p2", op, all_three, numel=NUMEL, deadline_s=3.0)
    crew.give("p2", wide)
    ends = crew.ends(wide, all_three)
    narrow = crew.plan("p0", op, pair, numel=NUMEL)
    for name in pair:
        assert not ends[name].report.ok or ends[name].values == (crew.mean_of(narrow),)
    assert not ends["p2"].report.ok
    commit(crew, following(op), all_three)


class LateFrames:
    """Holds back the data frames of one op, in one direction, and lets them go behind the first of any other op."""

    def __init__(self, op: OpId, direction: str) -> None:
        self._op = (op.term, op.round, op.fragment, op.attempt)
        self._direction = direction
        self._greetings: dict[Pair, int] = {}
        self._heard: dict[Pair, bytearray] = {}
        self._held = bytearray()
        self._lock = threading.Lock()
        self.num_held = self.num_late = 0

    def __call__(self, pair: Pair, direction: str, data: bytes) -> bytes:
        if direction != self._direction:
            return data
        with self._lock:
            return self._sort(pair, data)

    def _sort(self, pair: Pair, data: bytes) -> bytes:
        greeting = self._greetings.get(pair, HELLO_BYTES + PROOF_BYTES)
        heard = self._heard.setdefault(pair, bytearray())
        out = bytearray(data[:greeting])
        heard += data[greeting:]
        self._greetings[pair] = max(0, greeting - len(data))
        while len(heard) >= FRAME_BYTES:
            kind = heard[4]
            op = struct.unpack_from("<QQII", heard, 8)
            length = struct.unpack_from("<I", heard, 44)[0]
            if len(heard) < FRAME_BYTES + length:
                break
            frame = bytes(heard[: FRAME_BYTES + length])
            del heard[: FRAME_BYTES + length]
            if op == self._op and kind in (CONTRIBUTION, FINISHED):
                self._held += frame
                self.num_held += 1
                continue
            out += frame
            if op != self._op and any(op) and self._held:
                out += self._held
                self.num_late, self._held = self.num_held, bytearray()
        return bytes(out)


@pytest.mark.parametrize("later", ["attempt", "term"])
def test_stale_frames_delivered_late_have_no_effect(crew: FaultCrew, op: OpId, later: str) -> None:
    """All data that p1 sent p0 in an attempt that was given up arrives in the middle of the next one."""
    late = LateFrames(op, DOWN)
    proxy = crew.proxy("p0", "p1")
    proxy.rewrite = late
    proxy.reset()
    try:
        plan = crew.begin(op, ("p0", "p1"), numel=NUMEL, deadline_s=1.0, scale=4096.0)
        assert failed(crew.ends(plan, ("p0", "p1")))
        assert late.num_held > 0
        before = crew.peers["p0"].holds().stats["dropped_frames"]
        new = following(op) if later == "attempt" else OpId(op.term + 1, op.round)
        commit(crew, new, ("p0", "p1"))
        assert late.num_late == late.num_held
        assert crew.peers["p0"].holds().stats["dropped_frames"] - before >= late.num_late
    finally:
        proxy.rewrite = None
        proxy.reset()


@pytest.mark.parametrize("after_s", [0.01, 0.05, 0.3])
def test_an_abort_ends_the_wait_within_100_ms(crew: FaultCrew, op: OpId, after_s: float) -> None:
    """p2 never begins, so the op cannot end by itself."""
    for name in ("p0", "p1"):
        crew.give(name, crew.plan(name, op, THREE, numel=NUMEL, deadline_s=30.0))
    time.sleep(after_s)
    begin = time.monotonic()
    for name in ("p0", "p1"):
        crew.peers[name].abort(op)
    for name in ("p0", "p1"):
        assert "aborted" in crew.peers[name].done(op, 5.0 + SLACK_S).report.reason
    assert time.monotonic() - begin < 0.1 + SLACK_S
    commit(crew, following(op), THREE)
