"""Proofs of the session key: whatever a request or reply is about changes them."""

from __future__ import annotations

import msgspec
import pytest

from atoll.recovery import proof
from atoll.recovery.proof import Request

KEY = b"k" * 32
ASKED = Request(
    run="run",
    donor="p0",
    method="GET",
    target="/v1/held/3",
    byte_range="bytes=0-9",
    server_nonce=b"s" * 16,
    client_nonce=b"c" * 16,
    count=4,
)


def proof_in(credentials: str) -> str:
    parsed = proof.parse_credentials(credentials)
    assert parsed is not None
    return parsed[2]


def test_a_request_fits_its_proof() -> None:
    credentials = ASKED.credentials(KEY)
    assert proof.parse_credentials(credentials) == (b"c" * 16, 4, proof_in(credentials))
    assert ASKED.fits(KEY, proof_in(credentials))
    assert not ASKED.fits(b"x" * 32, proof_in(credentials))


@pytest.mark.parametrize(
    "change",
    [
        {"run": "other"},
        {"donor": "p1"},
        {"method": "HEAD"},
        {"target": "/v1/held/4"},
        {"byte_range": "bytes=0-99"},
        {"byte_range": ""},
        {"server_nonce": b"t" * 16},
        {"client_nonce": b"d" * 16},
        {"count": 5},
        {"run": "runp0", "donor": ""},
    ],
)
def test_any_change_makes_it_worthless(change: dict[str, object]) -> None:
    mac = proof_in(ASKED.credentials(KEY))
    other = msgspec.structs.replace(ASKED, **change)
    assert not other.fits(KEY, mac)
    reply = ASKED.reply_proof(KEY, 200, 3, b"abc")
    assert not other.reply_fits(KEY, reply, 200, 3, b"abc")


def test_a_reply_is_proved_with_status_length_and_body() -> None:
    mac = ASKED.reply_proof(KEY, 200, 3, b"abc")
    assert ASKED.reply_fits(KEY, mac, 200, 3, b"abc")
    assert not ASKED.reply_fits(KEY, mac, 404, 3, b"abc")
    assert not ASKED.reply_fits(KEY, mac, 200, 4, b"abc")
    assert not ASKED.reply_fits(KEY, mac, 200, 3, b"abd")
    assert not ASKED.reply_fits(KEY, mac, 200, 3, None)
    assert not ASKED.reply_fits(b"x" * 32, mac, 200, 3, b"abc")
    assert not ASKED.reply_fits(KEY, proof_in(ASKED.credentials(KEY)), 200, 3, b"abc"), (
        "a request is no reply"
    )


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Atoll",
        "Basic abc",
        f"Atoll {'0' * 32} -1 {'0' * 64}",
        f"Atoll {'0' * 32} 1 {'0' * 63}",
        "Atoll x y z",
    ],
)
def test_what_is_no_proof_is_none(header: str) -> None:
    assert proof.parse_credentials(header) is None


def test_a_challenge_carries_the_nonce() -> None:
    assert proof.parse_challenge(proof.challenge(b"n" * 16)) == b"n" * 16
    assert proof.parse_challenge("Basic realm=x") is None
