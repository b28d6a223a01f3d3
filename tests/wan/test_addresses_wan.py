"""Addresses that need more than loopback (K09): names that mean loopback, no name server, no IPv6, a forwarded port.

make wan                                         all
pytest -m wan tests/wan/test_addresses_wan.py    these
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.slack import SLACK_S
from support.swarm import QUADRATIC, environment
from support.wan_crew import lab
from support.wan_swarm import HUB, PORT, WanSwarm

pytestmark = [pytest.mark.wan, pytest.mark.timeout(240)]

SITES = {"p0": "none", "p1": "none", "p2": "fullcone", "p3": "cone"}
WAITS = {"dead_s": 5.0, "heartbeat_s": 0.5, "attempt_s": 20.0}
ENDS_WITHIN_S = 15.0


@pytest.fixture(scope="module")
def network() -> Iterator[Any]:
    sites: dict[str, Any] = {HUB: {"up": "100mbit", "down": "100mbit"}}
    sites |= {name: {"up": "100mbit", "down": "100mbit", "nat": nat} for name, nat in SITES.items()}
    with lab({"sites": sites, "default": {"rtt_ms": 20}, "links": []}) as up:
        yield up


def with_file(command: list[str], file: Path, over: str) -> list[str]:
    """The command in a world of its own where `over` is this file."""
    script = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh", str(file), over, *command]


class Elsewhere(WanSwarm):
    """Whose peers may have files of their own in the place of the system's."""

    files: dict[str, tuple[Path, str]]

    def __init__(self, up: Any, folder: Path, **more: Any) -> None:
        self.files = {}
        super().__init__(up, folder, **more)

    def quadratic(self, name: str, center: float, *arguments: object) -> Any:
        real, at = self.lab.command, self.files.get(name)
        if at is not None:
            self.lab.command = lambda site, command: real(site, with_file(command, *at))
        try:
            return super().quadratic(name, center, *arguments)
        finally:
            self.lab.command = real


def commits(swarm: WanSwarm, names: tuple[str, ...]) -> None:
    swarm.finish_well(within_s=120)
    swarm.assert_one_history()
    assert all(set(event["members"]) == set(names) for event in swarm.events("RoundCommitted"))
    assert swarm.events("AttemptFailed") == []


def test_a_host_name_that_is_loopback_is_told_to_nobody(network: Any, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 homebox\n")
    with Elsewhere(network, tmp_path, start_peers=2, **WAITS) as swarm:
        swarm.files["p1"] = (hosts, "/etc/hosts")
        swarm.quadratic("p0", 1.0, "--rounds", 2)
        swarm.quadratic("p1", 5.0, "--rounds", 2, "--advertise", "homebox")
        commits(swarm, ("p0", "p1"))
        (doubt,) = swarm.events("AddressDoubted", "p1")
        assert "homebox, which is 127.0.1.1 here" in doubt["reason"], "the fault fired"
        assert doubt["address"] == network.addr("p1")
        assert swarm.events("AddressDoubted", "p0") == []
        assert swarm.events("ReachChanged") == [], "both are dialled where they are"


def test_no_name_server_ends_the_start_with_one_line(network: Any, tmp_path: Path) -> None:
    """Its address takes packets and answers none."""
    servers = tmp_path / "resolv.conf"
    servers.write_text("".join(f"nameserver 10.77.250.{number}\n" for number in (7, 8, 9)))
    command = [sys.executable, str(QUADRATIC), "--address", "coordinator.example:7070", "--peer", "p0"]
    command += ["--center", "1", "--results", str(tmp_path / "r"), "--out", str(tmp_path)]
    begun_s = time.monotonic()
    ended = subprocess.run(
        network.command("p0", with_file(command, servers, "/etc/resolv.conf")),
        env={**environment(), "PYTHONPATH": ":".join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    took_s = time.monotonic() - begun_s
    print(f"after {took_s:.1f} s: {ended.stderr}")
    assert took_s < ENDS_WITHIN_S + SLACK_S
    assert ended.returncode in (2, 4)
    last = ended.stderr.strip().splitlines()[-1]
    assert "coordinator.example:7070" in last
    assert "name" in last
    assert "Traceback" not in ended.stderr


def test_without_ipv6_all_is_as_ever(network: Any, tmp_path: Path) -> None:
    """One side has none at all: the engine listens on what there is."""
    code, said = network.run("p0", ["sysctl", "-w", "net.ipv6.conf.all.disable_ipv6=1"])
    assert code == 0, said
    try:
        with WanSwarm(network, tmp_path, start_peers=2, **WAITS) as swarm:
            for index, name in enumerate(("p0", "p1")):
                swarm.quadratic(name, float(index), "--rounds", 2, "--bind", "auto")
            commits(swarm, ("p0", "p1"))
    finally:
        network.run("p0", ["sysctl", "-w", "net.ipv6.conf.all.disable_ipv6=0"])


def test_a_forwarded_port_is_reached_at_what_the_coordinator_sees(network: Any, tmp_path: Path) -> None:
    """Two behind NATs, one of which forwards all: with a fixed port it tells the address that it is seen as, and the
    other, which only dials out, reaches it there. The coordinator's site is no peer's: nobody else joins them."""
    with WanSwarm(network, tmp_path, start_peers=2, **WAITS) as swarm:
        swarm.quadratic("p2", 1.0, "--rounds", 3, "--port", PORT)
        swarm.quadratic("p3", 5.0, "--rounds", 3)
        commits(swarm, ("p2", "p3"))
        (doubt,) = swarm.events("AddressDoubted", "p2")
        assert doubt["address"] == f"{network.addr('p2')}, {network.public('p2')}"
        assert f"forward port {PORT}" in doubt["reason"]
        (other,) = swarm.events("AddressDoubted", "p3")
        assert "only dials out" in other["reason"]
        told = swarm.events("ReachChanged")[-1]
        assert told["none"] == []
        assert told["one_way"] == [["p3", "p2"]], told


def test_state_is_fetched_at_the_address_that_answers(network: Any, tmp_path: Path) -> None:
    """The donor's first address is a private one; the newcomer finds its sidecar at the other."""
    with WanSwarm(network, tmp_path, start_peers=1, **WAITS) as swarm:
        long = ("--rounds", 10_000, "--round-s", 0.5, "--numel", 100_000)
        swarm.quadratic("p2", 1.0, *long, "--port", PORT)
        swarm.wait(lambda: len(swarm.events("RoundCommitted")) >= 2, within_s=90, what="two rounds")
        swarm.quadratic("p3", 5.0, *long)

        def both() -> int:
            return sum(set(event["members"]) == {"p2", "p3"} for event in swarm.events("RoundCommitted"))

        swarm.wait(lambda: both() >= 2, within_s=90, what="two rounds of both")
        assert swarm.events("CaughtUp", "p3"), "it has fetched the state"
        swarm.assert_one_history()
