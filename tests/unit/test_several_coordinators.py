"""A peer that knows several coordinators' addresses: it finds the one that leads, and the next one after it."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll import events
from atoll.addresses import join_address, split_address, split_addresses
from atoll.errors import ConfigError, Refused, Unreachable
from atoll.membership.client import Member
from support.etcd import free_ports
from support.fake_peer import QUICK, CoordinatorThread, FakePeer, new_member
from support.proxy import UP, Fault, Proxy
from support.slack import SLACK_S


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@contextmanager
def standing_by() -> Iterator[str]:
    """What a coordinator that does not lead says to everybody."""

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def closed() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


def test_the_one_that_leads_is_found_wherever_it_stands(journal: Path) -> None:
    with CoordinatorThread(journal) as coordinator, standing_by() as other:
        for addresses in (f"{other},{coordinator.address}", f" {coordinator.address} , {closed()}"):
            member = new_member(addresses, "a")
            assert member.connect().term == 1
            member.close()


def test_an_address_that_never_answers_leaves_time_for_the_next(journal: Path) -> None:
    with CoordinatorThread(journal) as coordinator, socket.create_server(("127.0.0.1", 0)) as silent:
        member = new_member(f"127.0.0.1:{silent.getsockname()[1]},{coordinator.address}", "a", connect_s=2.0)
        begun_s = time.monotonic()
        assert member.connect().term == 1
        assert time.monotonic() - begun_s < 1.0 + SLACK_S
        member.close()


def test_every_address_is_named_with_what_it_did() -> None:
    gone = closed()
    with standing_by() as other:
        member = new_member(f"{gone},{other}", "a", connect_s=0.5)
        answers = f"{gone}: connection refused; {other}: it stands by: another coordinator leads"
        with pytest.raises(
            Unreachable, match=re.escape(f"no coordinator at {gone}, {other} in 0.5 s ({answers})")
        ):
            member.connect()
        member.close()


def test_one_that_refuses_does_not_keep_a_peer_from_the_next(journal: Path, tmp_path: Path) -> None:
    with (
        CoordinatorThread(journal) as coordinator,
        CoordinatorThread(tmp_path / "other", run="other") as foreign,
    ):
        member = new_member(f"{foreign.address},{coordinator.address}", "a")
        assert member.connect().term == 1
        member.close()
        member = new_member(f"{closed()},{foreign.address}", "a", connect_s=2.0)
        with pytest.raises(Refused, match=f"{foreign.address}: this coordinator runs 'other', not 'run'"):
            member.connect()
        member.close()


def test_a_run_goes_on_at_another_address_and_stays_there(journal: Path) -> None:
    ports = free_ports(2)
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
    with CoordinatorThread(journal, port=ports[0]) as first:
        fake = FakePeer(new_member(addresses, "a"), "a")
        fake.join()
        fake.run(rounds=2)
    assert isinstance(first.seen(events.RoundCommitted), events.RoundCommitted)
    with CoordinatorThread(journal, port=ports[1]) as second:
        fake.run(rounds=4)
        assert second.seen(events.RoundCommitted)
        wait_until_first(fake.member, f"127.0.0.1:{ports[1]}", within_s=SLACK_S)
    fake.member.close()


def test_one_that_falls_silent_is_tried_last(journal: Path) -> None:
    with CoordinatorThread(journal) as coordinator, standing_by() as other:
        proxy = Proxy(0, coordinator.port)
        through = f"127.0.0.1:{proxy.port(UP)}"
        member = new_member(f"{through},{other}", "a")
        member.connect()
        stall = Fault("stall")
        proxy.arm(stall)
        wait_until_first(member, other, within_s=QUICK.dead_s + SLACK_S)
        assert stall.fired.is_set()
        proxy.arm(None)
        wait_until_first(member, through, within_s=QUICK.connect_s + SLACK_S)
        member.close()
        proxy.close()


def wait_until_first(member: Member, address: str, within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while member._attendant._search._addresses[0] != address:
        assert time.monotonic() < deadline_s, f"{address} did not come first within {within_s} s"
        time.sleep(0.005)


def test_addresses_are_checked_one_by_one_before_anything_starts() -> None:
    assert split_addresses("a:1, b:2,a:1") == ("a:1", "b:2")
    for text in ("", "a:1,", "a:1,,b:2", "a:1,b"):
        with pytest.raises(ConfigError, match="is no coordinator address; write it as host:port"):
            split_addresses(text)


@pytest.mark.parametrize("address", ["host:7070", "[::1]:7070", "127.0.0.1:1"])
def test_an_address_can_be_taken_apart_and_put_together(address: str) -> None:
    assert join_address(*split_address(address)) == address
