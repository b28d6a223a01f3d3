"""Strangers on the port of an engine at work: nothing is allocated for them, nothing stalls, descriptors come back."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from atoll.values import OpId
from support.fault_crew import FaultCrew
from support.raw_peer import FRAME_BYTES, HELLO_BYTES, Frame, hello
from support.slack import SLACK_S

pytestmark = pytest.mark.fault

NUMEL = 1_000_000
CONNECT_S = 1.0
TLS_HELLO = bytes.fromhex("160301020001fc0303") + bytes(range(32)) + bytes(470)
LYING_NAME = hello("test", "p0", "p1")[:16] + b"\xff\xff\xff\xff" + hello("test", "p0", "p1")[20:]
LYING_FRAME = Frame(2, (1, 1, 0, 0), 0).pack(length=0xFFFFFFFF)[:FRAME_BYTES]

STRANGERS: dict[str, Callable[[], bytes]] = {
    "http": lambda: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls hello": lambda: TLS_HELLO,
    "ssh": lambda: b"SSH-2.0-OpenSSH_9.6\r\n",
    "noise": lambda: secrets.token_bytes(8192),
    "a lying name length": lambda: LYING_NAME,
    "a frame without a hello": lambda: LYING_FRAME * 8,
    "half a hello": lambda: hello("test", "p0", "p1")[: HELLO_BYTES // 2],
    "a hello without proof, then a lying frame": lambda: hello("test", "p0", "p1") + bytes(32) + LYING_FRAME,
}


@pytest.fixture(scope="module")
def crew() -> Iterator[FaultCrew]:
    with FaultCrew(3, connect_timeout_s=CONNECT_S) as crew:
        yield crew


@contextmanager
def barrage(port: int, say: Callable[[], bytes]) -> Iterator[list[int]]:
    """Connections one after the other that say this and wait to be hung up on; counts them."""
    over, counted = threading.Event(), [0]

    def knock() -> None:
        while not over.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=2.0) as one,
            ):
                one.sendall(say())
                one.settimeout(CONNECT_S + SLACK_S)
                while one.recv(4096):
                    pass
            counted[0] += 1

    threads = [threading.Thread(target=knock) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield counted
    finally:
        over.set()
        for thread in threads:
            thread.join(CONNECT_S + SLACK_S + 5.0)


def reduce_exactly(crew: FaultCrew) -> float:
    """One op of all, with the right value; the slowest member's seconds."""
    plan = crew.begin(OpId(1, crew.next_round()), crew.names, numel=NUMEL, deadline_s=20.0)
    ends = crew.ends(plan, crew.names)
    for done in ends.values():
        assert done.report.ok, done.report.reason
        assert done.values == (crew.mean_of(plan),)
    return max(done.seconds for done in ends.values())


def rss(crew: FaultCrew, name: str) -> int:
    return psutil.Process(crew.peers[name].process.pid).memory_info().rss


def fds_come_back(crew: FaultCrew, name: str, fds: int) -> None:
    end = time.monotonic() + CONNECT_S + SLACK_S + 5.0
    while (now := crew.peers[name].holds().fds) > fds:
        assert time.monotonic() < end, f"{name} has {now} descriptors open, {fds} before"
        time.sleep(0.05)


@pytest.mark.parametrize("what", STRANGERS)
def test_ops_run_on_while_strangers_knock(crew: FaultCrew, what: str) -> None:
    reduce_exactly(crew)
    before, memory = crew.peers["p1"].holds(), rss(crew, "p1")
    with barrage(crew.peers["p1"].port, STRANGERS[what]) as knocks:
        end = time.monotonic() + 10.0 + SLACK_S
        while knocks[0] < 4:
            reduce_exactly(crew)
            assert time.monotonic() < end, "the strangers are not hung up on"
    assert crew.peers["p1"].holds().stats["refused_hellos"] > before.stats["refused_hellos"]
    assert rss(crew, "p1") - memory < 64 << 20
    fds_come_back(crew, "p1", before.fds)


def test_a_crowd_of_idle_strangers_keeps_nobody_out(crew: FaultCrew) -> None:
    """They take few descriptors, a peer whose link broke gets in past them, and after a while all are gone."""
    reduce_exactly(crew)
    before = crew.peers["p1"].holds()
    crowd = [socket.create_connection(("127.0.0.1", crew.peers["p1"].port), timeout=5.0) for _ in range(300)]
    try:
        crew.proxy("p0", "p1").reset()
        end = time.monotonic() + 10.0 + SLACK_S
        while True:  # the first may meet the broken link
            plan = crew.begin(OpId(1, crew.next_round()), crew.names, numel=NUMEL, deadline_s=5.0)
            if all(done.report.ok for done in crew.ends(plan, crew.names).values()):
                break
            assert time.monotonic() < end
        assert crew.peers["p1"].holds().fds <= before.fds + 64 + 2
        fds_come_back(crew, "p1", before.fds)
    finally:
        for one in crowd:
            one.close()
