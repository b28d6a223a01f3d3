"""A run on an emulated wide-area network: it is split, a site falls silent, an address leads nowhere.

make wan                                            all
pytest -m wan tests/wan/test_membership_wan.py      these
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.slack import SLACK_S
from support.wan_crew import lab
from support.wan_swarm import HUB, WanSwarm, star

pytestmark = [pytest.mark.wan, pytest.mark.timeout(300)]

PEERS = {"p0": 1.0, "p1": 3.0, "p2": 8.0}
NUMEL = 1_000_000  # 4 MB in fp32: a transfer of about half a second
DEAD_S = 3.0
WAITS = {"dead_s": DEAD_S, "heartbeat_s": 0.5, "coordinator_lost_s": 120.0, "attempt_s": 20.0}
LONG = ["--numel", NUMEL, "--rounds", 10_000, "--round-s", 1.5]  # so long that who comes back can catch up


@pytest.fixture(scope="module")
def network() -> Iterator[Any]:
    with lab(star(PEERS)) as up:
        yield up


@pytest.fixture
def swarm(network: Any, tmp_path: Path) -> Iterator[WanSwarm]:
    network.heal()
    with WanSwarm(network, tmp_path, start_peers=len(PEERS), **WAITS) as swarm:
        yield swarm


def commits(swarm: WanSwarm) -> list[dict[str, Any]]:
    return swarm.events("RoundCommitted")


def all_at_one_version(swarm: WanSwarm, above: int) -> bool:
    """Whether every peer has recorded one and the same version above this one."""
    held = [{row["version"] for row in peer.rounds()} for peer in swarm.peers.values()]
    return any(version > above for version in set.intersection(*held))


@pytest.mark.parametrize(
    "apart", [("p2",), ("p0", "p1")], ids=["coordinator with most", "coordinator with few"]
)
def test_a_split_in_the_middle_of_a_reduce_leaves_one_history(
    swarm: WanSwarm, apart: tuple[str, ...]
) -> None:
    """Row 14: nobody is told, packets vanish. The side with the coordinator goes on, the other one waits; once the
    network is healed all are on that one history."""
    stay = tuple(name for name in PEERS if name not in apart)
    for name, center in PEERS.items():
        swarm.quadratic(name, center, *LONG, "--mark-reducing-in-round", 2)
    swarm.wait_for_marker(swarm.peers["p0"])
    before = swarm.swallowed()
    swarm.split((HUB, *stay), apart)
    newest = len(commits(swarm))
    swarm.wait(lambda: len(commits(swarm)) >= newest + 4, within_s=90, what="four rounds of one side")
    assert swarm.swallowed() > before, "the cut took nothing"
    assert set(commits(swarm)[-1]["members"]) == set(stay)
    split_at = commits(swarm)[-1]["version"]
    for name in apart:
        assert max((row["version"] for row in swarm.peers[name].rounds()), default=0) < split_at
    swarm.lab.heal()
    swarm.wait(
        lambda: set(commits(swarm)[-1]["members"]) == set(PEERS), within_s=90, what="all in a round again"
    )
    swarm.wait(lambda: all_at_one_version(swarm, split_at), within_s=60, what="all at one version")
    swarm.assert_one_history()
    versions = [event["version"] for event in commits(swarm)]
    assert versions == list(range(1, len(versions) + 1)), "every version is committed once"


def test_a_silent_site_is_found_within_the_dead_timeout(swarm: WanSwarm) -> None:
    """Row 15, for the coordinator: no packet comes, no connection ends. At most dead_s + 2 s, and what a loaded
    machine adds (SLACK_S); afterwards the others commit, and the site takes part again once it is back."""
    for name, center in PEERS.items():
        swarm.quadratic(name, center, "--rounds", 10_000, "--round-s", 1.0)
    swarm.wait(lambda: len(commits(swarm)) >= 2, within_s=90, what="two rounds")
    before, cut_s = swarm.swallowed(), time.time()
    swarm.lab.cut("p1")
    swarm.wait(lambda: swarm.events("PeerLost"), within_s=60, what="p1 is lost")
    found_s = swarm.when("PeerLost") - cut_s
    print(f"found after {found_s:.2f} s, dead_s is {DEAD_S:g} s")
    assert swarm.swallowed() > before
    assert swarm.events("PeerLost")[0]["peer"] == "p1"
    assert found_s <= DEAD_S + 2.0 + SLACK_S
    newest = len(commits(swarm))
    swarm.wait(lambda: len(commits(swarm)) > newest, within_s=60, what="a round of the others")
    swarm.lab.heal()
    swarm.wait(lambda: "p1" in commits(swarm)[-1]["members"], within_s=90, what="p1 takes part again")
    swarm.assert_one_history()


def test_addresses_that_nobody_can_reach_are_named_with_the_remedy(network: Any, tmp_path: Path) -> None:
    """Both advertise what leads nowhere, so neither can dial the other (one that can be dialled would be enough).
    Told is who could not reach whom, at which address, and what to do: within 15 s of the first attempt, which is
    connect_s twice, since broken links are tried once more."""
    network.heal()
    with WanSwarm(network, tmp_path, start_peers=2, **{**WAITS, "connect_s": 5.0}) as swarm:
        for name, host in (("p0", "10.77.250.7"), ("p1", "10.77.250.8")):
            swarm.quadratic(name, PEERS[name], "--rounds", 2, "--advertise", host)
        swarm.wait(lambda: swarm.events("AttemptStarted"), within_s=90, what="the first attempt")
        swarm.wait(lambda: swarm.events("PeerLost"), within_s=15 + SLACK_S, what="one is sent away")
        (lost,) = swarm.events("PeerLost")
        took_s = swarm.when("PeerLost") - swarm.when("AttemptStarted")
        print(f"after {took_s:.1f} s: {lost['reason']}")
        assert took_s <= 15 + SLACK_S
        assert "p0->p1" in lost["reason"] or "p1->p0" in lost["reason"]
        assert "10.77.250." in lost["reason"]
        assert "local.advertise" in lost["reason"]
        code = swarm.finish(lost["peer"], within_s=30)[lost["peer"]]
        assert code == 6, swarm.logs()
        assert "local.advertise" in swarm.peers[lost["peer"]].output()
