"""Behind NAT: which pairs connect directly, which by the other end's call, and which rounds go round.

make wan                                    all
pytest -m wan tests/wan/test_nat_wan.py     these
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import pytest

from atoll.values import OpId, Range, RankInfo
from support.slack import SLACK_S
from support.trainer import write_text
from support.trusted_wan_swarm import TrustedWanSwarm
from support.wan_crew import WanCrew, lab
from support.wan_swarm import HUB, WanSwarm

pytestmark = [pytest.mark.wan, pytest.mark.timeout(300)]

# Of two the lower name dials first, so there are closed ones on both sides of the open ones.
KINDS = {
    "p0": "symmetric",
    "p1": "cone",
    "p2": "open",
    "p3": "fullcone",
    "p4": "firewall that drops",
    "p5": "firewall that rejects",
}
OPEN = {"open", "fullcone"}
FIREWALLS = {
    "firewall that drops": ["-j", "DROP"],
    "firewall that rejects": ["-j", "REJECT", "--reject-with", "tcp-reset"],
}
CONNECT_S = 3.0
DIRECT, CALLED, ROUND = "direct", "called back", "gone round"

# Ends with 0 once the address takes a connection, with 1 if it does not within two seconds.
KNOCK = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2.0)"


def network(kinds: dict[str, str]) -> dict[str, Any]:
    sites: dict[str, Any] = {HUB: {"up": "100mbit", "down": "100mbit"}}
    for name, kind in kinds.items():
        nat = kind if kind in ("symmetric", "cone", "fullcone") else "none"
        sites[name] = {"up": "100mbit", "down": "100mbit", "nat": nat}
    return {"sites": sites, "default": {"rtt_ms": 20}, "links": []}


def shut(up: Any, name: str, kind: str) -> None:
    """What a firewall does with calls from outside."""
    if kind in FIREWALLS:
        rule = ["iptables", "-w", "-A", "INPUT", "-i", "wan0", "-p", "tcp", "--syn", *FIREWALLS[kind]]
        code, said = up.run(name, rule)
        assert code == 0, said


def knocks(up: Any, site: str, host: str, port: int) -> bool:
    code, _ = up.run(site, [sys.executable, "-c", KNOCK, host, str(port)], timeout=30)
    return bool(code == 0)


@pytest.fixture(scope="module")
def crew() -> Iterator[WanCrew]:
    with lab(network(KINDS)) as up:
        for name, kind in KINDS.items():
            shut(up, name, kind)
        with WanCrew(len(KINDS), up, CONNECT_S) as crew:
            yield crew


def reachable(name: str) -> bool:
    return KINDS[name] in OPEN


def test_the_faults_are_there(crew: WanCrew) -> None:
    """Each engine listens, as its own site sees, and those that are shut take no call from outside."""
    for name, peer in crew.peers.items():
        assert knocks(crew.lab, name, crew.lab.addr(name), peer.port), f"{name} does not listen"
        outside = next(other for other in ("p2", "p3") if other != name)
        assert knocks(crew.lab, outside, crew.lab.public(name), peer.port) == reachable(name), KINDS[name]


def test_the_table_of_pairs(crew: WanCrew) -> None:
    """Of every kind with every other: who dialled, seen at both engines, in an op that only these two share."""
    table: dict[tuple[str, str], str] = {}
    for first, second in combinations(crew.names, 2):
        before = {name: crew.peers[name].holds().stats for name in (first, second)}
        plan = crew.begin(OpId(1, crew.next_round()), (first, second), numel=4000, deadline_s=15.0)
        done = {name: crew.peers[name].done(plan.op, 20.0 + SLACK_S) for name in (first, second)}
        after = {name: crew.peers[name].holds().stats for name in (first, second)}

        def grew(name: str, what: str) -> bool:
            return bool(after[name][what] > before[name][what])  # noqa: B023

        if not all(each.report.ok for each in done.values()):
            assert not any(each.report.ok for each in done.values())
            assert all(
                {first, second} == {edge.source, edge.target}
                for each in done.values()
                for edge in each.report.broken
            )
            assert all(each.seconds < CONNECT_S + 2.0 + SLACK_S for each in done.values())
            table[first, second] = ROUND
        elif grew(first, "dialled_links"):
            assert grew(second, "accepted_links")
            table[first, second] = DIRECT
        else:
            assert grew(second, "dialled_links")
            assert grew(first, "accepted_links")
            table[first, second] = CALLED
    for pair, how in table.items():
        print(f"{KINDS[pair[0]]:>22} {KINDS[pair[1]]:>22}: {how}")
    wanted = {
        (first, second): DIRECT if reachable(second) else CALLED if reachable(first) else ROUND
        for first, second in combinations(crew.names, 2)
    }
    assert table == wanted


def test_trials_tell_who_can_dial_whom(crew: WanCrew) -> None:
    """Whatever links there are already: each direction by itself, and all within the trial's time."""
    infos = {
        name: RankInfo(crew.lab.public(name), peer.port, (Range(0, 1),)) for name, peer in crew.peers.items()
    }
    found = {}
    for name, peer in crew.peers.items():
        reached = peer.dial({other: info for other, info in infos.items() if other != name}, 2.0)
        for other in reached.where:
            found[name, other] = True
        for other, why in reached.failed.items():
            found[name, other] = False
            assert f"{infos[other].host} port {infos[other].port}" in why
    assert found == {(a, b): reachable(b) for a, b in permutations(crew.names, 2)}


# ---- a run -------------------------------------------------------------------------------------------------------

RUN = {"p0": "symmetric", "p1": "cone", "p2": "open", "p3": "open"}
WAITS = {"dead_s": 5.0, "heartbeat_s": 0.5, "attempt_s": 20.0, "connect_s": 10.0}
NUMEL = 200_000


@pytest.fixture(scope="module")
def homes() -> Iterator[Any]:
    with lab(network(RUN)) as up:
        yield up


@pytest.mark.parametrize("kind", [WanSwarm, TrustedWanSwarm], ids=["in a VPN", "TLS"])
def test_a_run_with_two_that_only_dial_out_commits_and_never_tries_their_edge(
    homes: Any, tmp_path: Path, kind: type[WanSwarm]
) -> None:
    """No attempt fails: that the two at home cannot meet is found out before the first round is planned."""
    with kind(homes, tmp_path, start_peers=len(RUN), **WAITS) as swarm:
        for index, name in enumerate(RUN):
            swarm.quadratic(name, float(index + 1), "--rounds", 5, "--numel", NUMEL)
        swarm.finish_well(within_s=120)
        swarm.assert_one_history()
        commits = swarm.events("RoundCommitted")
        assert [event["version"] for event in commits] == [1, 2, 3, 4, 5]
        assert all(set(event["members"]) == set(RUN) for event in commits)
        assert swarm.events("AttemptFailed") == []
        assert all(event["op"].endswith("/a0") for event in commits)
        told = swarm.events("ReachChanged")[-1]
        assert told["none"] == [["p0", "p1"]]
        assert {tuple(edge) for edge in told["one_way"]} == {
            (a, b) for a in ("p0", "p1") for b in ("p2", "p3")
        }
        for pair in ("p2 -> p0", "p3 -> p1", "p0 -> p1"):  # the faults fired
            assert "192.168." in told["reasons"][pair], told
        reasons = [event["reason"] for event in swarm.events("AttemptStarted")]
        assert len(reasons) == 5


def test_a_newcomer_that_only_dials_out_costs_the_others_no_attempt(homes: Any, tmp_path: Path) -> None:
    with WanSwarm(homes, tmp_path, start_peers=3, **WAITS) as swarm:
        for index, name in enumerate(("p0", "p2", "p3")):
            swarm.quadratic(name, float(index + 1), "--rounds", 10_000, "--round-s", 0.5, "--numel", NUMEL)
        swarm.wait(lambda: len(swarm.events("RoundCommitted")) >= 2, within_s=90, what="two rounds")
        swarm.quadratic("p1", 9.0, "--rounds", 10_000, "--round-s", 0.5, "--numel", NUMEL)

        def all_four() -> int:
            return sum(set(event["members"]) == set(RUN) for event in swarm.events("RoundCommitted"))

        swarm.wait(lambda: all_four() >= 3, within_s=120, what="three rounds of all four")
        assert swarm.events("AttemptFailed") == []
        assert swarm.events("ReachChanged")[-1]["none"] == [["p0", "p1"]]
        swarm.assert_one_history()


RECIPE = """
[run]
name = "quadratic"
steps = 12
[model]
dim = 32
num_layers = 1
num_heads = 2
num_kv_heads = 2
[data]
sources = ["{text}"]
seq_len = 32
slots = 8
[inner]
batch_size = 4
[outer]
inner_steps = 3
[eval]
sequences = 4
[local]
out = "{out}"
threads = 1
coordinator = "{address}"
"""


def test_the_built_in_trainer_at_home(homes: Any, tmp_path: Path) -> None:
    """`atoll train`, as people start it: four peers, two of which only dial out, and one history."""
    with WanSwarm(homes, tmp_path, start_peers=len(RUN), **WAITS) as swarm:
        recipe = tmp_path / "run.toml"
        recipe.write_text(
            RECIPE.format(text=write_text(tmp_path / "text"), out=tmp_path, address=swarm.address)
        )
        for name in RUN:
            swarm.start(name, ["-m", "atoll", "train", str(recipe), "--set", f"local.peer={name}"])
        swarm.finish_well(within_s=200)
        assert swarm.events("ReachChanged")[-1]["none"] == [["p0", "p1"]]
        assert swarm.events("AttemptFailed") == []
        digests = {name: [event["digest"] for event in swarm.events("RoundApplied", name)] for name in RUN}
        assert len(digests["p0"]) == 4, digests
        assert len(set(map(tuple, digests.values()))) == 1, digests
