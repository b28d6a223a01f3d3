"""Addresses as people give them (K09), with real processes on loopback: each works, or ends soon with one line.

What needs more than loopback is in tests/wan/test_addresses_wan.py and test_nat_wan.py.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.ipv6 import has_ipv6
from support.slack import SLACK_S
from support.swarm import Swarm

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

ENDS_WITHIN_S = 15.0
NOWHERE = "192.0.2.77"  # an address that nobody has


class Ipv6Swarm(Swarm):
    def first_address(self) -> str:
        return "[::1]:0"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Swarm]:
    with Swarm(tmp_path, start_peers=2) as swarm:
        yield swarm


def commits_with(swarm: Swarm, first: tuple[object, ...], second: tuple[object, ...] = ()) -> None:
    """Both peers take part in two rounds and end well."""
    swarm.quadratic("a", 1.0, "--rounds", 2, *first)
    swarm.quadratic("b", 5.0, "--rounds", 2, *second)
    swarm.finish_well(within_s=120)
    swarm.assert_one_history()
    assert [event["version"] for event in swarm.events("RoundCommitted")] == [1, 2]
    assert swarm.events("AttemptFailed") == []


@pytest.mark.parametrize("bind", ["0.0.0.0", "auto", "127.0.0.1"])
def test_any_bind_that_takes_loopback_works(pair: Swarm, bind: str) -> None:
    """Port 0 is the default, and what the system chose is what others are told."""
    commits_with(pair, ("--bind", bind))


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine's loopback")
def test_a_coordinator_at_ipv6_loopback(tmp_path: Path) -> None:
    with Ipv6Swarm(tmp_path, start_peers=2) as swarm:
        assert swarm.address.startswith("[::1]:")
        commits_with(swarm, ())


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine's loopback")
def test_one_peer_at_ipv6_and_one_at_ipv4(pair: Swarm) -> None:
    """Each tells an address of one family only, and listens on both."""
    commits_with(
        pair, ("--bind", "auto", "--advertise", "::1"), ("--bind", "auto", "--advertise", "127.0.0.1")
    )


def test_one_wrong_address_is_made_up_for_by_the_other_ends_call(pair: Swarm) -> None:
    commits_with(pair, ("--advertise", NOWHERE))
    told = pair.events("ReachChanged")[-1]
    assert told["one_way"] == [["a", "b"]], told
    assert NOWHERE in told["reasons"]["b -> a"]


def test_of_several_addresses_the_one_that_answers_is_kept(pair: Swarm) -> None:
    """With the wrong one first on both sides: no address of either is right alone."""
    several = ("--advertise", f"{NOWHERE},127.0.0.1")
    commits_with(pair, (*several, "--bind", "auto"), (*several, "--bind", "auto"))
    assert pair.events("ReachChanged") == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--address", "2001:db8::1:7070"), ("brackets", "[2001:db8::1]:7070")),
        (("--address", "no-such-host.invalid:7070"), ("no-such-host.invalid:7070", "give host:port")),
        (("--address", "127.0.0.1:1"), ("127.0.0.1:1",)),
        (("--bind", "127.0.0.1:7000"), ("local.bind", "local.port")),
        (("--bind", NOWHERE), (NOWHERE, "an address of this machine")),
        (("--advertise", "0.0.0.0"), ("local.advertise 0.0.0.0", "nobody can dial it")),
        (("--advertise", "http://x:7000"), ("local.advertise", "http://x:7000")),
    ],
)
def test_what_cannot_work_ends_soon_with_one_line(
    pair: Swarm, arguments: tuple[str, ...], says: tuple[str, ...]
) -> None:
    begun_s = time.monotonic()
    peer = pair.quadratic("a", 1.0, *arguments)
    code = pair.finish("a", within_s=60)["a"]
    assert time.monotonic() - begun_s < ENDS_WITHIN_S + SLACK_S
    lines = peer.output().strip().splitlines()
    assert code in (2, 3, 4), lines
    assert "Traceback" not in peer.output()
    assert all(word in lines[-1] for word in says), lines


def test_a_port_that_is_taken_is_named(pair: Swarm) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        peer = pair.quadratic("a", 1.0, "--port", port)
        begun_s = time.monotonic()
        code = pair.finish("a", within_s=60)["a"]
        assert time.monotonic() - begun_s < ENDS_WITHIN_S + SLACK_S
    last = peer.output().strip().splitlines()[-1]
    assert code != 0
    assert f"port {port}" in last
    assert "choose a free port" in last
