"""The hub's relay: packets in WireGuard's outer form go between two peers, and nobody else gets anything passed on.

The packets are made up: sealed parts are random, mac1 is as WireGuard computes it. tests/wan/test_vpn_wan.py has real
ones.
"""

from __future__ import annotations

import hashlib
import os
import random
import struct

import pytest

from atoll.network import wireguard_relay
from atoll.network.wireguard_relay import HEARD_FOR_S, MAX_COPIES, Relay

A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))
HOME_A, HOME_B, HOME_C, STRANGER = (
    ("::ffff:192.0.2.1", 1),
    ("::ffff:192.0.2.2", 2),
    ("2001:db8::3", 3),
    ("h", 9),
)


def sealed(opening: bytes, size: int, receiver: bytes) -> bytes:
    """A handshake message whose mac1 proves knowledge of the receiver's public key."""
    body = opening + os.urandom(size - 32 - len(opening))
    key = hashlib.blake2s(b"mac1----" + receiver).digest()
    return body + hashlib.blake2s(body, key=key, digest_size=16).digest() + bytes(16)


def first(sender: int, receiver: bytes) -> bytes:
    return sealed(struct.pack("<II", 1, sender), 148, receiver)


def answer(sender: int, other: int, receiver: bytes) -> bytes:
    return sealed(struct.pack("<III", 2, sender, other), 92, receiver)


def data(receiver: int, size: int = 100) -> bytes:
    return struct.pack("<II", 4, receiver) + os.urandom(size)


@pytest.fixture
def relay() -> Relay:
    made = Relay()
    made.members([A, B, C])
    return made


def meet(relay: Relay, now_s: float = 0.0) -> None:
    """A and B find each other: session ends 10 (A's) and 20 (B's)."""
    assert relay.receive(first(1, A), HOME_B, now_s) == []  # B asks for A; nobody else is known
    assert relay.receive(first(10, B), HOME_A, now_s) == [HOME_B]
    assert relay.receive(answer(20, 10, A), HOME_B, now_s) == [HOME_A]


def test_two_that_ask_for_each_other_meet_and_send_both_ways(relay: Relay) -> None:
    meet(relay)
    assert relay.receive(data(20), HOME_A, 1.0) == [HOME_B]
    assert relay.receive(data(10), HOME_B, 1.0) == [HOME_A]
    assert relay.passed_bytes == 148 + 92 + 2 * 108


def test_who_is_known_is_asked_and_who_is_not_known(relay: Relay) -> None:
    meet(relay)
    assert relay.receive(first(30, B), HOME_C, 1.0) == [HOME_B, HOME_A], "A has not answered anybody yet"
    assert relay.receive(answer(11, 1, B), HOME_A, 1.0) == [HOME_B]
    assert relay.receive(first(31, B), HOME_C, 2.0) == [HOME_B], "now both are known"


def test_who_comes_from_another_address_is_followed(relay: Relay) -> None:
    """A NAT forgot A: the index that A sends to tells who it is."""
    meet(relay)
    elsewhere = ("::ffff:192.0.2.1", 777)
    assert relay.receive(data(20), elsewhere, 1.0) == [HOME_B]
    assert relay.receive(data(10), HOME_B, 1.0) == [elsewhere]


def test_a_session_in_use_keeps_its_ends_known(relay: Relay) -> None:
    meet(relay)
    for second in range(0, 4 * int(HEARD_FOR_S), 20):
        relay.receive(data(20), HOME_A, second)
        relay.receive(data(10), HOME_B, second)
    assert HOME_B in relay.receive(first(11, B), HOME_A, 4 * HEARD_FOR_S)


def test_strangers_get_nothing_passed_on(relay: Relay) -> None:
    """Without a member's public key there is no mac1, without a session no index."""
    meet(relay)
    assert relay.receive(first(5, b"x" * 32), STRANGER, 1.0) == []
    assert relay.receive(first(5, B)[:-33] + bytes(33), STRANGER, 1.0) == []
    assert relay.receive(answer(5, 10, b"x" * 32), STRANGER, 1.0) == []
    assert relay.receive(answer(5, 99, A), STRANGER, 1.0) == []
    assert relay.receive(data(99), STRANGER, 1.0) == []
    assert relay.receive(b"", STRANGER, 1.0) == relay.receive(b"\x01" * 148, STRANGER, 1.0) == []
    assert relay.receive(data(20), HOME_A, 2.0) == [HOME_B], "and the session is as it was"


def test_who_is_no_member_any_more_is_passed_nothing_new(relay: Relay) -> None:
    meet(relay)
    relay.members([A, C])
    assert relay.receive(first(12, B), HOME_A, 1.0) == []
    relay.members([])
    assert relay.receive(first(12, A), HOME_C, 1.0) == []


def test_what_it_remembers_is_bounded(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wireguard_relay, "MAX_HEARD", 50)
    monkeypatch.setattr(wireguard_relay, "MAX_ENDS", 80)
    for number in range(200):
        to = relay.receive(first(number, B), ("::ffff:198.51.100.1", number), 0.0)
        assert len(to) <= min(MAX_COPIES, 50)
    assert len(relay._heard) <= 50
    assert len(relay._ends) <= 80


def test_any_bytes_are_taken_calmly(relay: Relay) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    meet(relay)
    for _ in range(3000):
        packet = bytearray(
            rng.choice([first(10, B), answer(20, 10, A), data(20), data(10), rng.randbytes(64)])
        )
        for _ in range(rng.randrange(4)):
            packet[rng.randrange(len(packet))] = rng.randrange(256)
        cut = rng.randrange(len(packet) + 1) if rng.random() < 0.3 else len(packet)
        relay.receive(bytes(packet[:cut]), rng.choice([HOME_A, HOME_B, STRANGER]), rng.random() * 100)
