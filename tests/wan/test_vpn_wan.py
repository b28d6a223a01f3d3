"""`atoll vpn` on an emulated wide-area network: a hub, a site behind a cone NAT, a site behind a symmetric one.

make wan                                     all
pytest -m wan -s tests/wan/test_vpn_wan.py   these; they show the rates
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from atoll.network.path_rates import FASTER
from support.slack import SLACK_S
from support.vpn_lab import ATOLL, Conversation, VpnLab, child_environment, skip_without_tools
from support.wan_crew import lab
from support.wan_swarm import HUB, WanSwarm

pytestmark = [pytest.mark.wan, pytest.mark.timeout(300)]

SITES = (HUB, "p1", "p2")
CENTERS = {HUB: 1.0, "p1": 3.0, "p2": 8.0}
NUMEL = 250_000
PORT = 21_000
"""Of a second VPN beside the first, and none that the kernel gives to outgoing connections."""
NETWORK = {
    "sites": {
        HUB: {"up": "100mbit", "down": "100mbit"},
        "p1": {"up": "100mbit", "down": "100mbit", "nat": "cone"},
        "p2": {"up": "100mbit", "down": "100mbit", "nat": "symmetric"},
    },
    "default": {"rtt_ms": 20},
    "links": [],
}


@pytest.fixture(scope="module")
def network() -> Iterator[Any]:
    skip_without_tools()
    with lab(NETWORK) as up:
        yield up


class ElsewhereSwarm(WanSwarm):
    """With a coordinator beside the module's one."""

    port = 7272

    def first_address(self) -> str:
        return f"{self.lab.addr(HUB)}:{self.port}"


@pytest.fixture(scope="module")
def swarm(network: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WanSwarm]:
    with WanSwarm(network, tmp_path_factory.mktemp("run"), start_peers=len(SITES)) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def vpn(network: Any, swarm: WanSwarm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VpnLab]:
    with VpnLab(network, tmp_path_factory.mktemp("vpn"), swarm.run, SITES) as vpn:
        for site in SITES:
            vpn.up(site)
            vpn.echo_at(site)
        vpn.wait_for_all()
        yield vpn


def test_who_is_behind_nat_is_reached_directly_or_through_the_hub(vpn: VpnLab) -> None:
    """Nobody said who is the hub: the one behind no NAT is. A cone and a symmetric NAT let no packet through."""
    assert {vpn.status(site)["hub"] for site in SITES} == {HUB}
    assert {vpn.path(HUB, "p1"), vpn.path(HUB, "p2"), vpn.path("p1", HUB), vpn.path("p2", HUB)} == {"direct"}
    assert vpn.path("p1", "p2") == vpn.path("p2", "p1") == f"through {HUB}"
    talk = Conversation(vpn.lab, "p1", vpn.address("p2"))
    try:
        before = vpn.status(HUB)["relayed_bytes"]
        assert talk.say("over the hub " + "x" * 1000) == "over the hub " + "x" * 1000
        vpn.wait(lambda: vpn.status(HUB)["relayed_bytes"] > before + 2000, 20, "the hub passed it on")
    finally:
        talk.close()


@pytest.mark.parametrize("other", [HUB, "p2"])
def test_nothing_readable_leaves_the_machine(vpn: VpnLab, tmp_path: Path, other: str) -> None:
    """A marker sent inside is in no packet of the outer interface, even on its way through the hub; outside it is."""
    inside, outside = b"a-secret-of-the-run-in", b"a-secret-of-the-run-out"
    capture = tmp_path / "outer.pcap"
    with capturing(vpn, "p1", capture):
        assert tell(vpn, "p1", vpn.address(other), inside)
        assert tell(vpn, "p1", vpn.lab.public(HUB), outside)
        # There, and its echo: what came before is in the file by then.
        vpn.wait(lambda: capture.read_bytes().count(outside) >= 2, 20, "the marker sent outside is seen")
    seen = capture.read_bytes()
    assert len(seen) > 2000
    assert inside not in seen


def tell(vpn: VpnLab, site: str, address: str, marker: bytes) -> bool:
    """Whether an echo of the marker came back."""
    talk = Conversation(vpn.lab, site, address)
    try:
        return talk.connected and talk.say(marker.decode()) == marker.decode()
    finally:
        talk.close()


class capturing:  # noqa: N801  (it reads as a sentence)
    """tcpdump on a site's outer interface, whole packets into a file."""

    def __init__(self, vpn: VpnLab, site: str, file: Path) -> None:
        self._command = vpn.lab.command(
            site, ["tcpdump", "-i", "wan0", "-U", "-s", "0", "-w", str(file), "-Z", "root"]
        )

    def __enter__(self) -> None:
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr
        for line in self._process.stderr:
            if "listening on" in line:
                return
        raise AssertionError("tcpdump did not begin")

    def __exit__(self, *error: object) -> None:
        self._process.send_signal(signal.SIGINT)
        assert self._process.stderr
        self._process.stderr.close()
        self._process.wait(timeout=10)


def test_both_paths_are_measured_and_the_faster_is_named(vpn: VpnLab) -> None:
    """From p1 the hub is reached both ways, p2 only inside. The rates are shown, not asserted."""
    vpn.wait(lambda: vpn.peers("p1")[HUB]["measured_ago_s"] is not None, 60, "the hub is measured")
    vpn.wait(lambda: vpn.peers("p1")["p2"]["measured_ago_s"] is not None, 90, "p2 is measured")
    to_hub, to_p2 = vpn.peers("p1")[HUB], vpn.peers("p1")["p2"]
    direct, inside = to_hub["direct_bytes_per_s"], to_hub["vpn_bytes_per_s"]
    assert direct
    assert inside
    print(
        f"p1 to {HUB}: direct {direct * 8e-6:.0f}, VPN {inside * 8e-6:.0f} Mbit/s, ratio {inside / direct:.2f}; "
        f"p1 to p2 through {HUB}: {to_p2['vpn_bytes_per_s'] * 8e-6:.0f} Mbit/s"
    )
    assert to_hub["use"] in ("direct", "vpn"), to_hub
    used, other = (direct, inside) if to_hub["use"] == "direct" else (inside, direct)
    assert other <= FASTER * used, f"whichever is held, the other is not clearly faster: {to_hub}"
    assert set(to_hub["addresses"]) == {vpn.address(HUB), vpn.lab.public(HUB)}
    assert to_p2["direct_bytes_per_s"] is None
    assert (to_p2["use"], to_p2["addresses"][0]) == ("vpn", vpn.address("p2"))
    shown = vpn.atoll_at("p1", "status")
    assert shown.returncode == 0, shown.stderr
    assert "Mbit/s" in shown.stdout
    assert f"through {HUB}" in shown.stdout


def test_a_nat_that_forgets_its_mappings_breaks_no_connection(vpn: VpnLab) -> None:
    """A rebooted router: the symmetric one gives other ports afterwards. Connections inside go on, both ways."""
    talks = [Conversation(vpn.lab, "p1", vpn.address("p2")), Conversation(vpn.lab, HUB, vpn.address("p2"))]
    try:
        assert [talk.say("before") for talk in talks] == ["before", "before"]
        before = vpn.peers(HUB)["p2"]["endpoint"]
        vpn.lab.natflush("p1")
        vpn.lab.natflush("p2")
        begun_s = time.monotonic()
        assert [talk.say("after") for talk in talks] == ["after", "after"]
        took_s = time.monotonic() - begun_s
        print(f"answered {took_s:.1f} s after both NATs forgot")
        assert took_s < 25 + SLACK_S
        vpn.wait(lambda: vpn.peers(HUB)["p2"]["endpoint"] != before, 30, "p2 comes from another port")
        vpn.wait_for_all(30)
    finally:
        for talk in talks:
            talk.close()


def test_a_peer_that_is_killed_and_started_again_is_found_again(vpn: VpnLab) -> None:
    """SIGKILL: WireGuard goes on by itself. Started again it takes over its own interface, with the same address."""
    address = vpn.address("p1")
    process = vpn.processes["p1"]
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=10) == -signal.SIGKILL
    assert vpn.left(), "the interface stays"
    assert tell(vpn, HUB, address, b"nobody keeps it"), "and carries on"
    vpn.up("p1")
    vpn.wait(lambda: vpn.status("p1").get("written_s", 0) > time.time() - 2, 30, "p1 is kept again")
    vpn.wait(lambda: vpn.path("p1", HUB) == "direct", 30, "p1 hears the hub")
    vpn.wait(lambda: vpn.path("p1", "p2") == f"through {HUB}", 60, "p1 hears p2")
    assert vpn.address("p1") == address
    assert tell(vpn, HUB, address, b"kept again")
    assert tell(vpn, "p2", address, b"through the hub again")


def test_a_training_run_inside_the_vpn_commits_rounds_with_equal_digests(
    vpn: VpnLab, swarm: WanSwarm
) -> None:
    """Engines and sidecars listen inside the VPN and nowhere else; p1 and p2 reach each other through the hub."""
    relayed = vpn.status(HUB)["relayed_bytes"]
    for site, center in CENTERS.items():
        swarm.quadratic(site, center, "--numel", NUMEL, "--rounds", 3, "--bind", vpn.address(site))
    swarm.finish_well(within_s=150)
    swarm.assert_one_history()
    commits = swarm.events("RoundCommitted")
    assert len(commits) == 3
    assert all(set(commit["members"]) == set(SITES) for commit in commits)
    vpn.wait(
        lambda: vpn.status(HUB)["relayed_bytes"] > relayed + NUMEL * 4, 20, "weights went through the hub"
    )


def test_the_engine_takes_the_faster_path_and_changes_over_when_its_rate_drops(
    network: Any, tmp_path: Path
) -> None:
    """Both addresses are advertised. First the direct path leads nowhere; then it does, and the VPN loses every tenth
    packet: the engine's rate drops, both are measured again, and the next round's links are direct: p1's, since the
    hub cannot dial it."""
    sites = (HUB, "p1")
    with ElsewhereSwarm(network, tmp_path, start_peers=2, attempt_s=30.0, vote_s=30.0) as swarm:
        with VpnLab(network, tmp_path, swarm.run, sites, ElsewhereSwarm.port, "f") as vpn:
            inside_ports, outside_ports = (
                ["udp", "--dport", str(PORT)],
                ["tcp", "!", "--dport", str(swarm.port)],
            )
            lossy(network, ["p1"], "-A", outside_ports, "1.0")
            try:
                for site in sites:
                    vpn.up(site, "--port", str(PORT))
                vpn.wait_for_all()
                vpn.wait(lambda: vpn.peers("p1")[HUB]["vpn_bytes_per_s"], 60, "p1 has measured")
                vpn.wait(lambda: vpn.peers(HUB)["p1"]["vpn_bytes_per_s"], 60, "the hub has measured")
                for site in sites:
                    hosts = f"{vpn.interfaces[site]},wan0"
                    more = ["--numel", 500_000, "--rounds", 10_000, "--round-s", 1.0, "--advertise", hosts]
                    swarm.quadratic(site, CENTERS[site], *more)
                swarm.wait(lambda: len(commits_of(swarm)) >= 4, within_s=90, what="four rounds")
                inside, direct = vpn.address(HUB), vpn.lab.public(HUB)
                assert connected(vpn, "p1", inside) > 0
                assert connected(vpn, "p1", direct, but=swarm.port) == 0
            finally:
                lossy(network, ["p1"], "-D", outside_ports, "1.0")
            lossy(network, sites, "-A", inside_ports, "0.1")
            begun_s = time.monotonic()
            try:
                swarm.wait(lambda: vpn.peers("p1")[HUB]["use"] == "direct", within_s=150, what="a choice")
                print(f"chosen {time.monotonic() - begun_s:.0f} s later: {vpn.peers('p1')[HUB]['why']}")
                swarm.wait(
                    lambda: connected(vpn, "p1", direct, but=swarm.port), within_s=60, what="new links"
                )
                swarm.wait(lambda: connected(vpn, "p1", inside) == 0, within_s=60, what="no links inside")
                newest = len(commits_of(swarm))
                swarm.wait(lambda: len(commits_of(swarm)) >= newest + 2, within_s=60, what="rounds over them")
                assert connected(vpn, "p1", inside) == 0
                swarm.assert_one_history()
            finally:
                lossy(network, sites, "-D", inside_ports, "0.1")


def lossy(network: Any, sites: Sequence[str], what: str, packets: list[str], part: str) -> None:
    """From now on (-A), or no more (-D), this part of these packets is lost where it begins."""
    rule = ["-p", *packets, "-m", "statistic", "--mode", "random", "--probability", part, "-j", "DROP"]
    for site in sites:
        code, told = network.run(site, ["iptables", "-w", what, "OUTPUT", *rule])
        assert code == 0, told


def commits_of(swarm: WanSwarm) -> list[dict[str, Any]]:
    return swarm.events("RoundCommitted")


def connected(vpn: VpnLab, site: str, address: str, but: int = 0) -> int:
    """Established TCP connections from or to this address at the other end, those to port `but` left out."""
    _, out = vpn.lab.run(site, ["ss", "-Htn", "state", "established"])
    ends = [line.split()[3].rpartition(":") for line in out.splitlines()]
    return sum(host.strip("[]") == address and port != str(but) for host, _, port in ends)


def test_a_run_with_an_authority_needs_the_token_once(vpn: VpnLab, tmp_path: Path) -> None:
    """Certificates outlast tokens; and a coordinator that is killed and started again breaks nothing inside."""
    port, out = 7171, tmp_path / "sealed"
    coordinator = [*ATOLL, "coordinator", "--run", "sealed", "--bind", f"0.0.0.0:{port}", "--out", str(out)]
    environment = {**child_environment(), "ATOLL_TOKEN": ""}

    def start(*more: str) -> subprocess.Popen[bytes]:
        with (tmp_path / "coordinator.log").open("wb") as log:
            return subprocess.Popen(
                vpn.lab.command(HUB, [*coordinator, *more]), env=environment, stdout=log, stderr=log
            )

    def said() -> str:
        return (tmp_path / "coordinator.log").read_text()

    running = start("--new")
    try:
        vpn.wait(lambda: "token to join" in said(), 60, "the coordinator")
        fingerprint = re.findall(r"sha256:[0-9a-f]{64}", said())[0]
        options = ["--authority", fingerprint, "--port", str(PORT)]
        token = ["--token-file", str(out / "join.token")]
        with VpnLab(vpn.lab, tmp_path, "sealed", [HUB, "p1"], port, "s") as sealed:
            for site in (HUB, "p1"):
                sealed.up(site, *options, *token, env=environment)
            sealed.wait_for_all()
            address = sealed.address("p1")
            assert address.split(":")[:4] != vpn.address("p1").split(":")[:4], (
                "each run has a network of its own"
            )

            running.kill()
            running.wait(timeout=10)
            sealed.wait(lambda: "stays as it is" in sealed.status("p1")["trouble"], 30, "p1 misses it")
            assert sealed.path("p1", HUB) == "direct"
            running = start()
            sealed.wait(lambda: not sealed.status("p1")["trouble"], 60, "p1 hears of it again")
            assert sealed.path("p1", HUB) == "direct"

            sealed.processes["p1"].terminate()
            assert sealed.processes["p1"].wait(timeout=20) == 143
            sealed.wait(
                lambda: "p1" not in sealed.peers(HUB) or sealed.path(HUB, "p1") == "no answer", 30, "it left"
            )
            sealed.up("p1", *options, env=environment)  # no token
            sealed.wait(lambda: sealed.path("p1", HUB) == "direct", 60, "p1 is back, by its certificate")
            assert sealed.address("p1") == address
    finally:
        running.kill()
        running.wait(timeout=10)


def test_what_goes_wrong_is_one_line(vpn: VpnLab, tmp_path: Path) -> None:
    """After the others: it ends p2's."""
    line = refused(vpn, "p2")
    assert f"keeps {vpn.interfaces['p2']}: end it with atoll vpn down" in line
    assert vpn.atoll_at("p2", "down").returncode == 0
    assert vpn.processes["p2"].wait(timeout=10) == 143
    assert not [left for left in vpn.left() if "p2" in left or vpn.interfaces["p2"] in left]

    network = vpn.lab
    name = vpn.interfaces["p2"]
    assert network.run("p2", ["ip", "link", "add", name, "type", "bridge"])[0] == 0
    try:
        assert f"the interface {name} exists and is not Atoll's" in refused(vpn, "p2")
        down = vpn.atoll_at("p2", "down")
        assert (down.returncode, "is not Atoll's" in down.stderr) == (2, True)
        assert network.run("p2", ["ip", "link", "show", "dev", name])[0] == 0, "somebody else's is left alone"
    finally:
        network.run("p2", ["ip", "link", "del", "dev", name])

    taken = network.popen("p2", ["python3", "-c", HOLD, "51820"], stdout=subprocess.PIPE, text=True)
    try:
        assert taken.stdout.readline() == "held\n"
        assert "UDP port 51820: address already in use" in refused(vpn, "p2")
    finally:
        taken.kill()
        taken.wait(timeout=10)
        taken.stdout.close()


HOLD = """
import socket, sys, time
held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
held.bind(("0.0.0.0", int(sys.argv[1])))
print("held", flush=True)
time.sleep(60)
"""


def refused(vpn: VpnLab, site: str) -> str:
    """The one line of an `atoll vpn up` that ends at once, with exit code 3."""
    before = vpn.processes.get(site)
    end = vpn.log(site).stat().st_size
    process = vpn.up(site)
    code = process.wait(timeout=30)
    if before is not None:
        vpn.processes[site] = before
    said = vpn.log(site).read_text()[end:].splitlines()
    assert (code, len(said)) == (3, 1), said
    assert said[0].startswith("atoll: error: ")
    return said[0]


def test_nothing_stays_behind(vpn: VpnLab) -> None:
    """The last one: SIGINT to one, `down` to another, SIGKILL to the third and `down` when it is gone."""
    if vpn.processes["p2"].poll() is None:
        assert vpn.atoll_at("p2", "down").returncode == 0
        assert vpn.processes["p2"].wait(timeout=10) == 143
    vpn.processes[HUB].send_signal(signal.SIGKILL)
    vpn.processes[HUB].wait(timeout=10)
    vpn.processes["p1"].send_signal(signal.SIGINT)
    assert vpn.processes["p1"].wait(timeout=20) == 130
    assert vpn.left(), "the killed one's interface is still there"
    assert "no process kept it any more" in vpn.atoll_at(HUB, "down").stdout
    assert vpn.left() == []
    assert not any(vpn.status(site) for site in SITES)
