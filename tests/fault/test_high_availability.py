"""Two coordinators with their journal in a real etcd: whatever happens to one of them, or to etcd, the run has one
history, and no round is lost or done twice.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.etcd import EtcdProcess, free_ports, start_members
from support.proxy import UP, Fault, Proxy
from support.slack import SLACK_S
from support.swarm import close_to, environment
from support.two_coordinators import LEASE_S, TwoCoordinators

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

GOLDEN = [1.089297, 2.049694, 2.652032, 2.851829]
ROUNDS = ("--rounds", len(GOLDEN))
TAKEOVER_S = LEASE_S + SLACK_S


@pytest.fixture(autouse=True)
def empty(etcd: EtcdProcess) -> Iterator[None]:
    """Every test begins with an etcd that holds nothing."""
    yield
    etcd.clear()


def both(etcd: EtcdProcess) -> dict[str, str]:
    return {"east": etcd.endpoint, "west": etcd.endpoint}


def start_peers(swarm: TwoCoordinators, round_s: float = 1.0) -> None:
    for name, center in (("a", 1), ("b", 3)):
        swarm.quadratic(name, center, *ROUNDS, "--round-s", round_s)


def assert_nothing_lost(swarm: TwoCoordinators) -> None:
    """The values are those of an undisturbed run: every round was done, none twice, by both peers."""
    swarm.finish_well()
    for peer in swarm.peers.values():
        assert close_to(peer.thetas(), GOLDEN), (peer.name, peer.thetas())
    assert swarm.committed() == [1, 2, 3, 4]
    swarm.assert_one_history()


# ---- the leader ------------------------------------------------------------------------------------------------------


def test_the_second_takes_over_from_a_killed_leader(etcd: EtcdProcess, tmp_path: Path) -> None:
    """One peer waits with its update sent as ready, the other trains; neither ends, neither does a round twice."""
    with TwoCoordinators(tmp_path, both(etcd), start_peers=2) as swarm:
        waits = swarm.quadratic("a", 1, *ROUNDS, "--mark-ready-in-round", 1)
        trains = swarm.quadratic("b", 3, *ROUNDS, "--round-s", 3, "--mark-ready-in-round", 1)
        swarm.wait_for_marker(waits)
        swarm.hit("east", signal.SIGKILL)
        assert not trains.marker.exists(), "the fault came too late: both were ready"
        swarm.wait_until_it_leads("west", within_s=TAKEOVER_S)
        assert_nothing_lost(swarm)
        assert swarm.end_coordinators() == {"west": 0}
    assert swarm.terms() == {"east": [1], "west": [2]}


def test_the_second_takes_over_in_the_middle_of_a_transfer(etcd: EtcdProcess, tmp_path: Path) -> None:
    """The sum goes on without a coordinator, and its votes go to the next one, which has it made again."""
    go = tmp_path / "go"
    with TwoCoordinators(tmp_path, both(etcd), start_peers=2) as swarm:
        swarm.quadratic("a", 1, *ROUNDS)
        swarm.quadratic("b", 3, *ROUNDS, "--begin-after", go, "--fault-in-round", 1)
        swarm.wait(
            lambda: any(event["op"] == "t1/r2/f0/a0" for event in swarm.events("AttemptStarted")),
            within_s=90,
            what="the second round's attempt",
        )
        swarm.hit("east", signal.SIGKILL)
        go.touch()
        swarm.wait_until_it_leads("west", within_s=TAKEOVER_S)
        assert_nothing_lost(swarm)
    assert [event["version"] for event in swarm.events("RoundCommitted", "east")] == [1]
    assert [event["version"] for event in swarm.events("RoundCommitted", "west")] == [2, 3, 4]


@pytest.mark.parametrize("dead_s", [1.5, 8.0], ids=["peers left it", "peers still hold on to it"])
def test_a_frozen_leader_that_thaws_does_nothing_more(
    etcd: EtcdProcess, tmp_path: Path, dead_s: float
) -> None:
    with TwoCoordinators(tmp_path, both(etcd), start_peers=2, dead_s=dead_s) as swarm:
        start_peers(swarm)
        swarm.wait(lambda: swarm.peers["a"].rounds(), within_s=90, what="the first round")
        swarm.hit("east", signal.SIGSTOP)
        swarm.wait_until_it_leads("west", within_s=TAKEOVER_S)
        before = len(swarm.events(source="east"))
        assert not swarm.peers["a"].rounds()[3:], "the fault came too late"
        swarm.hit("east", signal.SIGCONT)
        swarm.wait(
            lambda: swarm.events("CoordinatorStoodBy", "east"), within_s=SLACK_S, what="east stands by"
        )
        after = [event["type"] for event in swarm.events(source="east")[before:]]
        assert after == ["CoordinatorSteppedDown", "CoordinatorStoodBy"]
        assert_nothing_lost(swarm)
        assert swarm.end_coordinators() == {"east": 0, "west": 0}
    (stepped_down,) = swarm.events("CoordinatorSteppedDown", "east")
    assert "its lease ended" in stepped_down["reason"]
    assert swarm.terms() == {"east": [1], "west": [2]}


def test_a_leader_that_is_stopped_politely_is_followed_at_once(etcd: EtcdProcess, tmp_path: Path) -> None:
    lease_s = 30.0
    with TwoCoordinators(
        tmp_path, both(etcd), start_peers=2, lease_s=lease_s, coordinator_lost_s=60.0
    ) as swarm:
        start_peers(swarm)
        swarm.wait(lambda: swarm.peers["a"].rounds(), within_s=90, what="the first round")
        swarm.hit("east", signal.SIGTERM)
        assert swarm.coordinators["east"].wait(10) == 143
        swarm.wait_until_it_leads("west", within_s=SLACK_S)
        assert_nothing_lost(swarm)


@pytest.mark.parametrize("kind", ["reject", "stall"])
def test_a_leader_that_is_cut_off_from_etcd_alone_gives_way(
    etcd: EtcdProcess, tmp_path: Path, kind: str
) -> None:
    """Peers reach both all the time, and follow the one that etcd knows."""
    proxy = Proxy(0, etcd.port)
    endpoints = {"east": f"127.0.0.1:{proxy.port(UP)}", "west": etcd.endpoint}
    try:
        with TwoCoordinators(tmp_path, endpoints, start_peers=2) as swarm:
            start_peers(swarm, round_s=1.5)
            swarm.wait(lambda: swarm.peers["a"].rounds(), within_s=90, what="the first round")
            fault = Fault(kind)
            proxy.arm(fault)
            swarm.wait_until_it_leads("west", within_s=TAKEOVER_S)
            assert fault.fired.is_set()
            swarm.wait(
                lambda: swarm.events("CoordinatorSteppedDown", "east"),
                within_s=SLACK_S,
                what="east steps down",
            )
            assert not swarm.peers["a"].rounds()[3:], "the fault came too late"
            assert_nothing_lost(swarm)
        assert swarm.terms() == {"east": [1], "west": [2]}
    finally:
        proxy.close()


# ---- etcd ------------------------------------------------------------------------------------------------------------


def test_an_outage_of_etcd_commits_nothing_and_then_the_run_goes_on(
    etcd: EtcdProcess, tmp_path: Path
) -> None:
    with TwoCoordinators(tmp_path, both(etcd), start_peers=2, lease_s=12.0, coordinator_lost_s=60.0) as swarm:
        start_peers(swarm, round_s=0.5)
        swarm.wait(lambda: swarm.peers["a"].rounds(), within_s=90, what="the first round")
        etcd.kill()
        held = {peer.name: peer.rounds() for peer in swarm.peers.values()}
        time.sleep(2.0)  # the fault itself: time for several rounds
        for name, rounds in held.items():
            assert swarm.peers[name].rounds()[len(rounds) + 1 :] == [], "a round was committed without etcd"
            assert len(rounds) < len(GOLDEN), "the fault came too late"
        etcd.start()
        assert_nothing_lost(swarm)
    assert swarm.terms() == {"east": [1], "west": []}, "the lease outlived the outage"


def test_an_outage_longer_than_the_lease_ends_the_lead_and_then_the_run_goes_on(
    etcd: EtcdProcess, tmp_path: Path
) -> None:
    with TwoCoordinators(tmp_path, both(etcd), start_peers=2) as swarm:
        start_peers(swarm)
        swarm.wait(lambda: swarm.peers["a"].rounds(), within_s=90, what="the first round")
        etcd.kill()
        swarm.wait(
            lambda: swarm.events("CoordinatorSteppedDown", "east"),
            within_s=TAKEOVER_S,
            what="east steps down",
        )
        assert not swarm.peers["a"].rounds()[3:], "the fault came too late"
        etcd.start()
        assert_nothing_lost(swarm)
        assert set(swarm.end_coordinators().values()) == {0}
    terms = [*swarm.terms()["east"], *swarm.terms()["west"]]
    assert sorted(terms) == [1, 2]


def test_one_of_three_members_of_etcd_may_go(etcd: EtcdProcess, tmp_path: Path) -> None:
    """The one that both coordinators ask first is killed; they ask the next one, and nothing else happens."""
    members = start_members(tmp_path, 3)
    all_of_them = ",".join(member.endpoint for member in members)
    try:
        endpoints = {"east": all_of_them, "west": all_of_them}
        with TwoCoordinators(
            tmp_path, endpoints, start_peers=2, lease_s=10.0, coordinator_lost_s=60.0
        ) as swarm:
            start_peers(swarm)
            swarm.wait(lambda: swarm.peers["a"].rounds(), within_s=90, what="the first round")
            members[0].kill()
            assert not swarm.peers["a"].rounds()[3:], "the fault came too late"
            assert_nothing_lost(swarm)
            assert swarm.end_coordinators() == {"east": 0, "west": 0}
        assert swarm.terms() == {"east": [1], "west": []}
    finally:
        for member in members:
            member.kill()


def test_no_etcd_at_the_start_is_one_line_and_exit_4(tmp_path: Path) -> None:
    place = f"etcd://127.0.0.1:{free_ports(1)[0]}/p"
    command = [sys.executable, "-m", "atoll", "coordinator", "--run", "r", "--bind", "127.0.0.1:0"]
    command += ["--journal", place, "--out", str(tmp_path), "--set", "membership.connect_s=1"]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert ended.returncode == 4
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"atoll: error: cannot use journal {place}: no etcd answers (")
    assert line.endswith("connection refused) for 1 s; start etcd, or check the addresses in --journal")


# ---- several coordinators --------------------------------------------------------------------------------------------


def test_a_coordinator_with_other_settings_does_not_stand_by(etcd: EtcdProcess, tmp_path: Path) -> None:
    """It would have to end in the moment that it is needed."""
    with TwoCoordinators(tmp_path, both(etcd), start_peers=1) as swarm:
        swarm.quadratic("a", 2, "--round-s", 1)
        swarm.wait(lambda: swarm.peers["a"].rounds(), within_s=90, what="the first round")
        run_toml = tmp_path / "run.toml"
        run_toml.write_text('[run]\nname = "quadratic"\n[outer]\nlr = 0.1\n')
        command = [sys.executable, "-m", "atoll", "coordinator", str(run_toml), "--bind", "127.0.0.1:0"]
        command += ["--journal", f"etcd://{etcd.endpoint}", "--out", str(tmp_path / "south")]
        ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2, ended.stderr
        assert "the journal belongs to a run with other settings" in ended.stdout + ended.stderr
        swarm.finish_well()
        assert swarm.end_coordinators() == {"east": 0, "west": 0}
