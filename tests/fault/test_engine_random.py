"""One fault at a random moment of an attempt, by seed: nothing is ever summed wrong, nothing hangs, nothing leaks.

pytest -m fault tests/fault/test_engine_random.py --seeds 100      many
pytest -m fault tests/fault/test_engine_random.py --seed 17        the one that failed
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator

import pytest

from atoll.plan.lanes import direct_lanes
from atoll.values import Edge, OpId, Plan
from support.fault_crew import FaultCrew
from support.fault_peer import Done, Holds
from support.proxy import DOWN, UP, Fault
from support.slack import SLACK_S
from support.trees import hops, random_lanes, ring_lanes

pytestmark = pytest.mark.fault

WORLD = 4
NUMEL = 1_000_000  # 4 MB in fp32
VECTOR_BYTES = 4 * NUMEL
DEADLINE_S = 2.5
MOST_CONNECTIONS = 3
SPARE_LINKS = 2  # with each node: after a link broke both ends may have dialled (kSpareLinks, connections.cc)
KINDS = ("SIGKILL", "SIGSTOP", "cut", "cut one way", "stall", "reject", "slow", "reset")


@pytest.fixture(scope="module")
def whole_crew() -> Iterator[FaultCrew]:
    with FaultCrew(WORLD) as crew:
        yield crew


@pytest.fixture
def crew(whole_crew: FaultCrew) -> Iterator[FaultCrew]:
    """Well again after each test, however that ended."""
    yield whole_crew
    whole_crew.recover()


class Story:
    """What a seed means: who takes part, what breaks, when."""

    def __init__(self, crew: FaultCrew, seed: int) -> None:
        rng = random.Random(seed)
        self.kind = KINDS[seed % len(KINDS)] if seed < 2 * len(KINDS) else rng.choice(KINDS)
        self.members = sorted(rng.sample(crew.names, rng.randint(2, WORLD)))
        shapes = (direct_lanes(self.members), ring_lanes(self.members), random_lanes(self.members, rng))
        self.lanes = rng.choice(shapes)
        self.connections = rng.choice((1, 1, MOST_CONNECTIONS))
        flows = self._flows()
        source, target = rng.choice(sorted(flows))
        self.victim, self.other = rng.sample((source, target), 2)
        self.direction = UP if source < target else DOWN
        most = flows[source, target]
        if self.signal is not None:
            most = sum(moved for (_, hears), moved in flows.items() if hears == self.victim)
        self.after = rng.randrange(500, max(501, int(0.9 * most)))
        self.fault = self._fault()

    def _flows(self) -> dict[tuple[str, str], float]:
        """What each link carries, one way."""
        flows: dict[tuple[str, str], float] = {}
        shares = sum(lane.share for lane in self.lanes)
        for lane in self.lanes:
            for link in hops(lane, self.members):
                flows[link] = flows.get(link, 0.0) + VECTOR_BYTES * lane.share / shares
        return flows

    def _fault(self) -> Fault | None:
        one_way = (self.direction,)
        match self.kind:
            case "cut" | "stall" | "reject" | "reset":
                return Fault(self.kind, self.after, (self.direction, UP if self.direction == DOWN else DOWN))
            case "cut one way":
                return Fault("cut", self.after, one_way)
            case "slow":
                return Fault("slow", self.after, one_way, bytes_per_s=8e6)
        return None

    @property
    def signal(self) -> signal.Signals | None:
        return signal.Signals[self.kind] if self.kind.startswith("SIG") else None

    def __str__(self) -> str:
        where = self.victim if self.signal else f"{self.victim}-{self.other} {self.direction}"
        lanes = "; ".join(
            f"{lane.root} {lane.up} {lane.down}" if lane.up else lane.root for lane in self.lanes
        )
        among = f"{', '.join(self.members)}, {self.connections} connections, lanes {lanes}"
        return f"{self.kind} at {where} after {self.after} bytes, among {among}"


def test_survivors_commit_the_exact_sum_or_name_what_broke(crew: FaultCrew, fault_seed: int) -> None:
    story = Story(crew, fault_seed)
    print(f"seed {fault_seed}: {story}")
    before = settle(crew)
    round_ = crew.next_round()
    ends, plan = strike(crew, story, OpId(1, round_))
    survivors = sorted(ends)
    check_values(crew, plan, ends)
    broken = check_names(story, ends)

    if any(not done.report.ok for done in ends.values()) or len(survivors) < len(story.members):
        if story.signal is None:
            crew.heal()
        left_out = broken if story.signal is None else ()
        again = crew.retry(OpId(1, round_, 0, 1), survivors, left_out, plan, numel=NUMEL, deadline_s=10.0)
        ends = crew.ends(again, again.members)
        assert all(done.report.ok for done in ends.values()), [done.report.reason for done in ends.values()]
        check_values(crew, again, ends)
    revive(crew, story, plan)
    settle(crew)
    check_leaks(crew, before)


def strike(crew: FaultCrew, story: Story, op: OpId) -> tuple[dict[str, Done], Plan]:
    """The attempt in which the fault happens; asserts that it did. How it ended on the survivors, and the plan."""
    halt = {}
    if story.signal is not None:
        halt = {story.victim: (story.signal.name, story.after)}
    else:
        crew.proxy(story.victim, story.other).arm(story.fault)
    plan = crew.begin(
        op,
        story.members,
        halt,
        numel=NUMEL,
        deadline_s=DEADLINE_S,
        lanes=story.lanes,
        connections=story.connections,
    )
    survivors = [name for name in story.members if story.signal is None or name != story.victim]
    ends = crew.ends(plan, survivors)
    if story.signal is not None:
        assert crew.peers[story.victim].suffered(story.signal), "the fault did not fire"
    else:
        assert story.fault is not None
        assert story.fault.fired.wait(5.0), "the fault did not fire"
    return ends, plan


def check_values(crew: FaultCrew, plan: Plan, ends: dict[str, Done]) -> None:
    """Whoever has a result has each contribution once: never another sum, never two sets in one op."""
    for name, done in ends.items():
        if done.report.ok:
            assert set(done.values) <= crew.values_of(plan), f"{name} holds {done.values}"


def check_names(story: Story, ends: dict[str, Done]) -> set[Edge]:
    """Who failed did so in time, and all broken edges touch what was broken. Returns those edges."""
    failed = {name: done for name, done in ends.items() if not done.report.ok}
    broken = {edge for done in failed.values() for edge in done.report.broken}
    for name, done in failed.items():
        assert done.seconds < DEADLINE_S + SLACK_S
        assert done.report.reason, name
    if failed:
        assert broken, [done.report.reason for done in failed.values()]
    if story.kind == "slow":
        assert not failed, [done.report.reason for done in failed.values()]
    for edge in broken:
        ends_of = {edge.source, edge.target}
        to_blame = (
            story.victim in ends_of if story.signal is not None else ends_of == {story.victim, story.other}
        )
        assert to_blame, f"{edge} is not to blame: {[done.report.reason for done in failed.values()]}"
    return broken


def revive(crew: FaultCrew, story: Story, plan: Plan) -> None:
    """Links heal, the dead one comes back, the frozen one thaws: its old attempt gets it nothing but what is exact."""
    crew.heal()
    if story.signal == signal.SIGKILL:
        crew.replace(story.victim)
    elif story.signal == signal.SIGSTOP:
        crew.peers[story.victim].send(signal.SIGCONT)
        thawed = crew.peers[story.victim].done(plan.op, plan.deadline_s + SLACK_S)
        check_values(crew, plan, {story.victim: thawed})


def settle(crew: FaultCrew) -> dict[str, Holds]:
    """All are well: ops of all, until one gets through; then what each process holds."""
    end = time.monotonic() + 20.0
    while True:
        plan = crew.begin(OpId(1, crew.next_round()), crew.names, numel=4000, deadline_s=5.0)
        ends = crew.ends(plan, crew.names)
        check_values(crew, plan, ends)
        if all(done.report.ok for done in ends.values()):
            return {name: peer.holds() for name, peer in crew.peers.items()}
        assert time.monotonic() < end, [done.report.reason for done in ends.values()]


def check_leaks(crew: FaultCrew, before: dict[str, Holds]) -> None:
    """Each process soon holds no more than before, besides links, which are kept, and of which there is a most."""
    most_fds = max(held.fds - held.stats["connections"] for held in before.values())
    most_threads = max(held.threads for held in before.values())
    end = time.monotonic() + 5.0 + SLACK_S

    def is_well(held: Holds) -> bool:
        links = held.stats["connections"]
        few = held.fds - links <= most_fds and links <= (MOST_CONNECTIONS + SPARE_LINKS) * (WORLD - 1)
        return few and held.threads <= most_threads

    while True:
        after = {name: peer.holds() for name, peer in crew.peers.items()}
        if all(is_well(held) for held in after.values()):
            return
        assert time.monotonic() < end, f"leaked: {before} then {after}"
        time.sleep(0.05)
