"""`atoll doctor` over an emulated network: firewalls, every kind of NAT, addresses that lead nowhere, a black hole.

make wan                                        all
pytest -m wan tests/wan/test_doctor_wan.py      these
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.slack import SLACK_S
from support.trusted_wan_swarm import TrustedWanSwarm
from support.wan_crew import lab
from support.wan_swarm import star

pytestmark = [pytest.mark.wan, pytest.mark.timeout(300)]

WAITS = {"dead_s": 5.0, "heartbeat_s": 0.5, "coordinator_lost_s": 120.0}
LONG = ["--numel", 100_000, "--rounds", 10_000, "--round-s", 2.0]
OPEN, CONE, SYMMETRIC, FULL = "open", "cone", "symmetric", "full"
RTT_MS, UP_MBIT = 40, 50
PORT = 7171


@pytest.fixture(scope="module")
def network() -> Iterator[Any]:
    net = star(("p0", OPEN, CONE, SYMMETRIC, FULL), rate=f"{UP_MBIT}mbit", rtt_ms=RTT_MS)
    for site, kind in ((CONE, "cone"), (SYMMETRIC, "symmetric"), (FULL, "fullcone")):
        net["sites"][site]["nat"] = kind
    with lab(net) as up:
        yield up


@pytest.fixture(scope="module")
def swarm(network: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrustedWanSwarm]:
    """One member that trains, at a site that anyone can reach."""
    with TrustedWanSwarm(network, tmp_path_factory.mktemp("swarm"), start_peers=1, **WAITS) as swarm:
        swarm.quadratic("p0", 1.0, *LONG)
        swarm.wait(lambda: len(swarm.events("RoundCommitted")) >= 2, within_s=90, what="two rounds")
        yield swarm


@contextlib.contextmanager
def firewall(network: Any, site: str, *rules: str) -> Iterator[None]:
    """nftables at a site: what the rules say, and what belongs to connections that are up passes."""
    if shutil.which("nft") is None:
        pytest.skip("the fault is made by nftables: apt-get install nftables")
    made = [
        "add table inet atolltest",
        "add chain inet atolltest in { type filter hook input priority 0; }",
        "add chain inet atolltest out { type filter hook output priority 0; }",
        *(f"add rule inet atolltest {rule}" for rule in rules),
    ]
    for line in made:
        code, said = network.run(site, ["nft", line], timeout=10)
        assert not code, said
    try:
        yield
    finally:
        network.run(site, ["nft", "delete table inet atolltest"], timeout=10)


def dropped(network: Any, site: str) -> int:
    """Packets that counting rules have seen."""
    _, said = network.run(site, ["nft", "-j", "list", "table", "inet", "atolltest"], timeout=10)
    rules = [each["rule"]["expr"] for each in json.loads(said)["nftables"] if "rule" in each]
    return sum(part["counter"]["packets"] for rule in rules for part in rule if "counter" in part)


def doctor(
    swarm: TrustedWanSwarm, site: str, *arguments: str, address: str = ""
) -> tuple[int, dict[str, Any]]:
    line = [address or swarm.address, "--run", swarm.run, "--authority", swarm.authority.fingerprint]
    command = [sys.executable, "-m", "atoll", "doctor", *line, "--json", *arguments]
    environment = {
        "ATOLL_TOKEN_FILE": str(swarm.token_file),
        "PYTHONPATH": ":".join(path for path in sys.path if path),
    }
    code, said = swarm.lab.run(site, command, timeout=90, env=environment)
    assert said.startswith("{"), said
    told = json.loads(said)
    print(json.dumps([each for each in told["findings"] if each["about"] != "machine"], indent=1))
    return code, told


def named(told: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in told["findings"] if each["name"] == name)


def problems(told: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each["name"], each["about"]) for each in told["findings"] if each["grade"] == "problem"]


def test_an_open_machine_is_fit_and_its_way_is_measured(network: Any, swarm: TrustedWanSwarm) -> None:
    rounds, lost = len(swarm.events("RoundCommitted")), len(swarm.events("PeerLost"))
    code, told = doctor(swarm, OPEN)
    assert (code, problems(told)) == (0, [])
    assert named(told, "nat")["details"]["kind"] == "none"
    assert named(told, "ports in")["grade"] == "ok"
    (way,) = told["members"]
    assert way["host"] == network.addr("p0")
    assert RTT_MS / 1000 <= way["rtt_s"] < 2 * RTT_MS / 1000 + SLACK_S
    assert way["bytes_per_s"] * 8 < 1.2e6 * UP_MBIT, "no faster than the line"
    assert way["bytes_per_s"] > 0
    assert named(told, "a round")["details"]["sync_s"] > 0
    swarm.wait(lambda: len(swarm.events("RoundCommitted")) > rounds, within_s=60, what="the run goes on")
    assert len(swarm.events("PeerLost")) == lost, "who only looks is no member, and nobody misses it"


@pytest.mark.parametrize(
    ("site", "arguments", "kind", "code", "grade"),
    [
        (CONE, (), "endpoint-independent", 0, "warning"),
        (SYMMETRIC, (), "endpoint-dependent", 0, "warning"),
        (SYMMETRIC, ("--set", f"local.port={PORT}"), "endpoint-dependent", 10, "problem"),
        (FULL, ("--set", f"local.port={PORT}"), "forwarded", 0, "ok"),
    ],
)
def test_each_kind_of_nat_is_told(
    network: Any,
    swarm: TrustedWanSwarm,
    site: str,
    arguments: tuple[str, ...],
    kind: str,
    code: int,
    grade: str,
) -> None:
    """Who is forwarded advertises the outer address too."""
    found_code, told = doctor(swarm, site, *arguments)
    assert named(told, "nat")["details"]["kind"] == kind
    assert named(told, "nat")["details"]["own"] == network.addr(site)
    assert named(told, "nat")["details"]["seen"] == network.public(site)
    assert named(told, "ports in")["grade"] == grade
    assert named(told, "ports out")["sentence"] == "1 of 1 member reached", "it can dial out"
    assert found_code == code
    if kind == "forwarded":
        assert network.public(site) in named(told, "advertised")["sentence"]


def test_a_port_that_nftables_closes_is_named(network: Any, swarm: TrustedWanSwarm) -> None:
    rule = f"in tcp dport {PORT} counter drop"
    with firewall(network, OPEN, rule):
        code, told = doctor(swarm, OPEN, "--set", f"local.port={PORT}")
        assert dropped(network, OPEN) > 0, "the fault fired"
    assert (code, problems(told)) == (10, [("ports in", "in")])
    inward = named(told, "ports in")
    assert (
        f"cannot reach port {PORT} at {network.addr(OPEN)} (no answer in 3 s): a firewall shuts it"
        in inward["sentence"]
    )
    assert f"tcp dport {PORT} accept" in inward["remedy"]
    assert named(told, "nat")["details"]["kind"] == "firewall"
    code, told = doctor(swarm, OPEN, "--set", f"local.port={PORT}")
    assert code == 0, "the port is open again"


def test_a_port_that_nftables_rejects_is_named(network: Any, swarm: TrustedWanSwarm) -> None:
    with firewall(network, OPEN, f"in tcp dport {PORT} counter reject with tcp reset"):
        code, told = doctor(swarm, OPEN, "--set", f"local.port={PORT}")
        assert dropped(network, OPEN) > 0
    assert code == 10
    assert "(connection refused)" in named(told, "ports in")["sentence"]


def test_a_way_out_that_nftables_closes_is_named(network: Any, swarm: TrustedWanSwarm) -> None:
    """The coordinator is reached, the member is not."""
    with firewall(network, OPEN, f"out ip daddr {network.addr('p0')} counter drop"):
        code, told = doctor(swarm, OPEN)
        assert dropped(network, OPEN) > 0
    assert (code, problems(told)) == (11, [("ports out", "out")])
    outward = named(told, "ports out")
    assert f"no way from here to p0 at {network.addr('p0')}:" in outward["sentence"]
    assert "here let connections out" in outward["remedy"]


def test_a_loopback_advertisement_is_named(network: Any, swarm: TrustedWanSwarm) -> None:
    code, told = doctor(swarm, OPEN, "--set", "local.advertise=127.0.0.1")
    assert (code, named(told, "advertised")["grade"]) == (0, "warning"), "it is not used, and that is said"
    assert "loopback" in named(told, "advertised")["sentence"]
    assert named(told, "advertised")["remedy"].endswith(f"local.advertise={network.addr(OPEN)}")


def test_a_host_name_that_is_loopback_is_named(network: Any, swarm: TrustedWanSwarm) -> None:
    """As Debian sets it up: the machine's own name is 127.0.1.1."""
    hosts = Path(f"/etc/netns/{network.pre}{OPEN}/hosts")
    before = hosts.read_text()
    hosts.write_text("127.0.1.1 bern\n" + before)
    try:
        code, told = doctor(swarm, OPEN, "--set", "local.advertise=bern")
    finally:
        hosts.write_text(before)
    assert (code, named(told, "advertised")["grade"]) == (0, "warning")
    assert "bern" in named(told, "advertised")["sentence"]
    assert "loopback" in named(told, "advertised")["sentence"]


def test_a_black_hole_is_given_up_in_time(network: Any, swarm: TrustedWanSwarm) -> None:
    before = swarm.swallowed()
    network.cut(OPEN)
    try:
        began_s = time.monotonic()
        code, told = doctor(swarm, OPEN, address=f"{swarm.address},{network.addr('p0')}:{PORT}")
        took_s = time.monotonic() - began_s
    finally:
        network.heal()
    assert swarm.swallowed() > before, "the fault fired"
    assert code == 4
    assert named(told, "coordinator")["sentence"].count("no answer") == 2
    print(f"took {took_s:.1f} s")
    assert took_s < 30 + SLACK_S


def test_a_member_that_falls_silent_between_is_named(network: Any, swarm: TrustedWanSwarm) -> None:
    """The coordinator is there, the member is cut off from this machine alone."""
    network.cut(OPEN, "p0")
    try:
        code, told = doctor(swarm, OPEN)
    finally:
        network.heal()
    assert (code, problems(told)) == (11, [("ports out", "out")])
    assert "no answer in time" in told["members"][0]["why_not"]
