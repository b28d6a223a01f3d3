"""K15 in a user's own loop: SIGTERM or Ctrl-C is a goodbye, whatever the peer was doing, and the others do not wait.

`dead_s` is long on purpose: only a goodbye lets the others go on at once.
"""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest

from atoll.signals import GONE_S
from support.slack import SLACK_S
from support.swarm import Peer, Swarm

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

GONE_WITHIN_S = 5.0
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}
PATIENT = {"dead_s": 60.0, "coordinator_lost_s": 90.0, "attempt_s": 60.0, "vote_s": 60.0, "stall_s": 120.0}


def is_handled(peer: Peer, number: signal.Signals) -> bool:
    """Whether Python has a handler for the signal just now (the kernel's SigCgt)."""
    try:
        lines = Path(f"/proc/{peer.process.pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return False
    (caught,) = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return bool(caught >> (number - 1) & 1)


def ask_to_end(swarm: Swarm, peer: Peer, number: signal.Signals) -> float:
    """Send the signal; returns the seconds until the process was gone, with the signal's code."""
    asked_s = time.monotonic()
    peer.send(number)
    assert swarm.finish(peer.name, within_s=GONE_WITHIN_S + SLACK_S) == {peer.name: CODES[number]}, (
        swarm.logs()
    )
    gone_s = time.monotonic() - asked_s
    print(f"gone {gone_s:.2f} s after {number.name}")
    return gone_s


def assert_goodbye(swarm: Swarm, name: str, number: signal.Signals) -> None:
    assert [(event["peer"], event["reason"]) for event in swarm.events("PeerLeft")] == [
        (name, f"stopped by {number.name}")
    ], swarm.logs()
    assert not swarm.events("PeerLost")


def assert_goes_on(swarm: Swarm, stays: Peer) -> None:
    rounds = len(stays.rounds())
    swarm.wait(lambda: len(stays.rounds()) > rounds, within_s=SLACK_S, what="a round without the other")
    assert stays.rounds()[-1]["members"] == [stays.name]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_in_its_inner_loop(tmp_path: Path, number: signal.Signals) -> None:
    with Swarm(tmp_path, start_peers=2, **PATIENT) as swarm:
        stays = swarm.quadratic("a", 1, "--rounds", 100_000, "--round-s", 0.2)
        goes = swarm.quadratic("b", 3, "--rounds", 100_000, "--halt-in-round", 1)
        swarm.wait_for_marker(goes)
        ask_to_end(swarm, goes, number)
        assert_goodbye(swarm, "b", number)
        assert_goes_on(swarm, stays)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_in_one_long_call(tmp_path: Path, number: signal.Signals) -> None:
    """No handler of Python's runs there: the others hear a goodbye all the same, and the process is ended."""
    with Swarm(tmp_path, start_peers=2, **PATIENT) as swarm:
        stays = swarm.quadratic("a", 1, "--rounds", 100_000, "--round-s", 0.2)
        goes = swarm.quadratic("b", 3, "--rounds", 100_000, "--block-in-round", 1)
        swarm.wait_for_marker(goes)
        goes.send(number)
        swarm.wait(lambda: swarm.events("PeerLeft"), within_s=GONE_WITHIN_S + SLACK_S, what="a goodbye")
        assert_goes_on(swarm, stays)
        assert swarm.finish("b", within_s=GONE_S + SLACK_S) == {"b": CODES[number]}
        assert_goodbye(swarm, "b", number)
        assert f"still busy 4 s after {number.name}" in goes.output()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_twice_in_one_long_call(tmp_path: Path, number: signal.Signals) -> None:
    with Swarm(tmp_path, start_peers=1, **PATIENT) as swarm:
        goes = swarm.quadratic("b", 3, "--rounds", 100_000, "--block-in-round", 1)
        swarm.wait_for_marker(goes)
        goes.send(number)
        time.sleep(0.2)  # the first must be there before the second; still long before GONE_S
        assert goes.process.poll() is None
        asked_s = time.monotonic()
        goes.send(number)
        assert swarm.finish("b", within_s=1.0 + SLACK_S) == {"b": CODES[number]}
        assert time.monotonic() - asked_s < 1.0 + SLACK_S
        assert f"asked twice to end: {number.name}" in goes.output()


def test_while_it_waits_for_a_verdict(tmp_path: Path) -> None:
    with Swarm(tmp_path, start_peers=2, **PATIENT) as swarm:
        stays = swarm.quadratic("a", 1, "--rounds", 100_000, "--round-s", 8)
        goes = swarm.quadratic("b", 3, "--rounds", 100_000, "--mark-ready-in-round", 0)
        swarm.wait_for_marker(goes)
        assert not stays.rounds(), "the fault came too late"
        ask_to_end(swarm, goes, signal.SIGTERM)
        assert_goodbye(swarm, "b", signal.SIGTERM)
        swarm.wait(stays.rounds, within_s=8 + SLACK_S, what="a round without the other")
        assert stays.rounds()[0]["members"] == ["a"]


def test_in_a_transfer(tmp_path: Path) -> None:
    """The other one stays out of it, so that it cannot be over before the signal."""
    begin = tmp_path / "begin"
    with Swarm(tmp_path, start_peers=2, **PATIENT) as swarm:
        late = ("--begin-after", begin, "--fault-in-round", 1)
        stays = swarm.quadratic("a", 1, "--rounds", 100_000, *late)
        goes = swarm.quadratic("b", 3, "--rounds", 100_000, "--mark-reducing-in-round", 1)
        swarm.wait_for_marker(goes)
        ask_to_end(swarm, goes, signal.SIGTERM)
        assert_goodbye(swarm, "b", signal.SIGTERM)
        begin.touch()
        assert_goes_on(swarm, stays)


def test_while_it_waits_for_the_run_to_start(tmp_path: Path) -> None:
    with Swarm(tmp_path, start_peers=2, **PATIENT) as swarm:
        goes = swarm.quadratic("b", 3)
        swarm.wait(lambda: swarm.events("PeerJoined"), within_s=90, what="a declaration")
        ask_to_end(swarm, goes, signal.SIGTERM)
        assert_goodbye(swarm, "b", signal.SIGTERM)


def test_while_it_connects(tmp_path: Path) -> None:
    """To a port that takes connections and says nothing: no coordinator, for as long as connecting may take."""
    with socket.create_server(("127.0.0.1", 0)) as silent, Swarm(tmp_path, start_peers=1) as swarm:
        swarm.address = "{}:{}".format(*silent.getsockname())
        goes = swarm.quadratic("b", 3)
        swarm.wait(lambda: is_handled(goes, signal.SIGTERM), within_s=90, what="a peer that connects")
        assert ask_to_end(swarm, goes, signal.SIGTERM) < GONE_WITHIN_S + SLACK_S


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_while_its_coordinator_is_gone(tmp_path: Path, how: signal.Signals) -> None:
    """There is nobody to say goodbye to; it is gone all the same."""
    with Swarm(tmp_path, start_peers=1, **PATIENT) as swarm:
        goes = swarm.quadratic("b", 3, "--rounds", 100_000, "--halt-in-round", 1)
        swarm.wait_for_marker(goes)
        swarm.coordinator.send_signal(how)
        ask_to_end(swarm, goes, signal.SIGTERM)
