"""The engine on an emulated wide-area network: cuts without a word, one-way cuts, rejects, slow and lossy links.

make wan                                                    all
pytest -m wan tests/wan/test_engine_wan.py --seed 3         one random fault again
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from atoll.plan.lanes import direct_lanes
from atoll.values import Edge, OpId, Plan
from support.fault_peer import Done
from support.slack import SLACK_S
from support.wan_crew import WanCrew, lab

pytestmark = pytest.mark.wan

WORLD = 4
SITES = tuple(f"p{index}" for index in range(WORLD))
THREE = SITES[:3]
NUMEL = 2_000_000  # 8 MB in fp32: a second at 100 Mbit/s
NETWORK = {
    "sites": {name: {"up": "100mbit", "down": "100mbit"} for name in SITES},
    "default": {"rtt_ms": 20},
    "links": [],
}


@pytest.fixture(scope="module")
def crew() -> Iterator[WanCrew]:
    with lab(NETWORK) as up, WanCrew(WORLD, up) as crew:
        yield crew


@pytest.fixture
def op(crew: WanCrew) -> Iterator[OpId]:
    """The first attempt of a fresh round, with links up. Afterwards the network is as it was."""
    until_all_commit(crew)
    crew.lab.stats()
    yield OpId(1, crew.next_round())
    for site in SITES:
        crew.lab.plug(site)
    crew.lab.heal()
    for name, peer in crew.peers.items():
        if peer.process.poll() is not None:
            crew.replace(name)


def until_all_commit(crew: WanCrew, within_s: float = 30.0) -> None:
    """Small ops of all until one gets through: what TCP held back comes when it comes."""
    end = time.monotonic() + within_s
    while True:
        plan = crew.begin(OpId(1, crew.next_round()), SITES, numel=4000, deadline_s=6.0)
        ends = crew.ends(plan, SITES)
        check_values(crew, plan, ends)
        if all(done.report.ok for done in ends.values()):
            return
        assert time.monotonic() < end, [done.report.reason for done in ends.values()]


def commit(crew: WanCrew, op: OpId, members: tuple[str, ...], **options: object) -> None:
    plan = crew.begin(op, members, numel=NUMEL, deadline_s=20.0, **options)
    ends = crew.ends(plan, members)
    assert all(done.report.ok for done in ends.values()), [done.report.reason for done in ends.values()]
    check_values(crew, plan, ends)


def check_values(crew: WanCrew, plan: Plan, ends: dict[str, Done]) -> None:
    for name, done in ends.items():
        if done.report.ok:
            assert done.values == (crew.mean_of(plan),), f"{name} holds {done.values}"


def broken_of(ends: dict[str, Done]) -> set[Edge]:
    return {edge for done in ends.values() for edge in done.report.broken}


def following(op: OpId) -> OpId:
    return replace(op, attempt=op.attempt + 1)


def dropped(crew: WanCrew) -> int:
    """Packets that cuts have swallowed since the network is up."""
    return sum(pair["cut_dropped"] for pair in crew.lab.stats()["pairs"].values())


def test_row_11_slow_and_lossy_links_kill_nobody(crew: WanCrew, op: OpId) -> None:
    """300 ms and 1 % loss on every link: slow, and right, and no link is called broken."""
    lost = sum(pair["lost"] for pair in crew.lab.stats()["pairs"].values())
    for a in SITES:
        for b in SITES:
            if a < b:
                crew.lab.link(a, b, rtt_ms=300, loss=0.01)
    plan = crew.begin(op, SITES, numel=200_000, deadline_s=60.0)
    ends = crew.ends(plan, SITES)
    assert sum(pair["lost"] for pair in crew.lab.stats()["pairs"].values()) > lost, "nothing was lost"
    assert all(done.report.ok for done in ends.values()), [done.report.reason for done in ends.values()]
    check_values(crew, plan, ends)


def test_row_12_one_site_cannot_reach_another(crew: WanCrew, op: OpId) -> None:
    """Cut in one direction only: both ends' failures name this pair, and lanes that avoid it serve everybody."""
    before = dropped(crew)
    plan = crew.begin(op, THREE, numel=NUMEL, deadline_s=5.0)
    time.sleep(0.2)
    crew.lab.cut("p0", "p2", oneway=True)
    ends = crew.ends(plan, THREE)
    assert dropped(crew) > before
    check_values(crew, plan, ends)
    broken = broken_of(ends)
    assert broken
    assert broken <= {Edge("p0", "p2"), Edge("p2", "p0")}
    commit(crew, following(op), THREE, lanes=direct_lanes(THREE, broken))


def test_row_15_a_site_falls_silent(crew: WanCrew, op: OpId) -> None:
    """Packets vanish, nobody gets a reset: found by time, and the others go on; the site comes back after it heals."""
    before = dropped(crew)
    plan = crew.begin(op, SITES, numel=NUMEL, deadline_s=5.0)
    time.sleep(0.2)
    crew.lab.cut("p3")
    ends = crew.ends(plan, SITES)
    assert dropped(crew) > before
    check_values(crew, plan, ends)
    for name, done in ends.items():
        assert not done.report.ok
        assert done.seconds < plan.deadline_s + SLACK_S, name
    assert all("p3" in (edge.source, edge.target) for edge in broken_of(ends)), ends
    assert broken_of(ends)
    commit(crew, following(op), THREE)
    crew.lab.heal()
    until_all_commit(crew)


KINDS = ("cut", "cut one way", "reject", "unplug", "slow", "SIGKILL", "SIGSTOP")


def test_a_random_fault_at_a_random_moment(crew: WanCrew, op: OpId, fault_seed: int) -> None:
    """Whoever finished holds the exact value; the others fail in time and blame the right site; the rest go on."""
    rng = random.Random(fault_seed)
    kind = KINDS[fault_seed % len(KINDS)]
    victim, other = rng.sample(SITES, 2)
    after_s = rng.uniform(0.05, 0.6)
    print(f"seed {fault_seed}: {kind} at {victim} (and {other}) after {after_s:.2f} s")
    plan = crew.begin(op, SITES, numel=NUMEL, deadline_s=5.0)
    time.sleep(after_s)
    fired = strike(crew, kind, victim, other)
    stopped = kind in ("SIGKILL", "SIGSTOP")
    survivors = tuple(name for name in SITES if not stopped or name != victim)
    ends = crew.ends(plan, survivors)
    assert fired(), "the fault did not fire"
    check_values(crew, plan, ends)
    failed = {name: done for name, done in ends.items() if not done.report.ok}
    if kind == "slow":
        assert not failed, [done.report.reason for done in failed.values()]
        return
    assert all(done.seconds < plan.deadline_s + SLACK_S for done in failed.values())
    assert all(victim in (edge.source, edge.target) for edge in broken_of(ends)), ends
    if failed:
        assert broken_of(ends), [done.report.reason for done in failed.values()]
    rest = tuple(name for name in SITES if name != victim)
    commit(crew, following(op), rest)
    if kind == "SIGSTOP":
        crew.peers[victim].send(signal.SIGCONT)
        thawed = crew.peers[victim].done(op, plan.deadline_s + SLACK_S)
        check_values(crew, plan, {victim: thawed})


def strike(crew: WanCrew, kind: str, victim: str, other: str):  # type: ignore[no-untyped-def]
    """Make the fault; returns what says, afterwards, whether it had an effect."""
    before = dropped(crew)
    match kind:
        case "cut":
            crew.lab.cut(victim)
            return lambda: dropped(crew) > before
        case "cut one way":
            crew.lab.cut(victim, other, oneway=True)
            return lambda: dropped(crew) > before
        case "reject":
            crew.lab.cut(victim, reject=True)
            return lambda: bool(crew.lab.st["reject"])
        case "unplug":
            crew.lab.unplug(victim)
            return lambda: "state DOWN" in crew.lab.run(victim, ["ip", "link", "show", "wan0"])[1]
        case "slow":
            crew.lab.slow(victim, "40mbit")
            return lambda: True
    number = signal.Signals[kind]
    crew.peers[victim].send(number)
    return lambda: crew.peers[victim].suffered(number)


def test_what_a_way_loses_is_told_to_who_plans(crew: WanCrew, op: OpId) -> None:
    """Between p0 and p1 packets are lost, between p2 and p3 none are. Comes last: paces remember it for some ops."""
    crew.lab.link("p0", "p1", loss=0.02)
    before = crew.lab.stats()["pairs"]
    seen: dict[Edge, float] = {}
    for pair in (("p0", "p1"), ("p2", "p3")):
        plan = crew.begin(OpId(1, crew.next_round()), pair, numel=NUMEL // 2, deadline_s=60.0, connections=8)
        ends = crew.ends(plan, pair)
        check_values(crew, plan, ends)
        for name, done in ends.items():
            assert done.report.ok, done.report.reason
            links = [link for link in done.report.stats.links if link.source == name and link.target]
            seen |= {Edge(link.source, link.target): link.loss for link in links}
    after = crew.lab.stats()["pairs"]
    for there in (Edge("p0", "p1"), Edge("p1", "p0")):
        name = f"{there.source}>{there.target}"
        assert after[name]["lost"] - before[name]["lost"] > 20, after[name]
        assert 0.01 < seen[there] < 0.04, seen
    for there in (Edge("p2", "p3"), Edge("p3", "p2")):
        assert seen[there] < 0.001, seen


def first_ops_with_each() -> dict[Edge, tuple[int, float]]:
    """p0's first op with p1, then with p2, at 80 ms: what queues dropped on each way, and the loss it told."""
    seen: dict[Edge, tuple[int, float]] = {}
    with lab({**NETWORK, "default": {"rtt_ms": 80}}) as up, WanCrew(3, up) as crew:
        for pair in (("p0", "p1"), ("p0", "p2")):
            plan = crew.begin(
                OpId(1, crew.next_round()), pair, numel=2 * NUMEL, deadline_s=60.0, connections=4
            )
            ends = crew.ends(plan, pair)
            assert all(done.report.ok for done in ends.values()), ends
            check_values(crew, plan, ends)
            pairs = crew.lab.stats()["pairs"]
            for name, done in ends.items():
                (link,) = (link for link in done.report.stats.links if link.source == name and link.target)
                full = pairs[f"{name}>{link.target}"]["tail_dropped"]
                seen[Edge(name, link.target)] = (full, link.loss)
    return seen


def test_what_the_line_carries_is_known_before_the_next_node_is() -> None:
    """TCP finds the rate of the first way by overflowing the line. The way to another node begins with what is known,
    since all ways share the line. And what queues drop is no loss of the way."""
    for _ in range(5):  # a machine that is too busy to fill the line shows nothing
        seen = first_ops_with_each()
        first, second = seen[Edge("p0", "p1")], seen[Edge("p0", "p2")]
        if first[0] > 100:
            break
    assert first[0] > 100, "the line never overflowed: there was nothing to learn"
    assert second[0] < first[0] / 3, seen
    assert all(loss < 0.001 for _, loss in seen.values()), seen
