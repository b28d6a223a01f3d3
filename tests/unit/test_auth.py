"""Token proofs: each fits exactly one connection, peer and direction; nothing readable travels."""

from __future__ import annotations

import msgspec
import pytest

from atoll.errors import ConfigError
from atoll.membership import auth

TOKEN = b"a token that is long enough"
HANDSHAKE = auth.Handshake(
    protocol=1,
    run="run",
    peer="peer-0",
    incarnation="i0",
    server_nonce=b"s" * 32,
    client_nonce=b"c" * 32,
)
OTHERS = {
    "protocol": 2,
    "run": "other",
    "peer": "peer-1",
    "incarnation": "i1",
    "server_nonce": b"t" * 32,
    "client_nonce": b"d" * 32,
}


def test_a_proof_fits_its_own_handshake() -> None:
    assert HANDSHAKE.peer_proof_fits(TOKEN, HANDSHAKE.peer_proof(TOKEN))


def test_another_token_does_not_fit() -> None:
    assert not HANDSHAKE.peer_proof_fits(TOKEN, HANDSHAKE.peer_proof(TOKEN[:-1]))


@pytest.mark.parametrize("field", OTHERS)
def test_a_proof_fits_no_other_handshake(field: str) -> None:
    other = msgspec.structs.replace(HANDSHAKE, **{field: OTHERS[field]})
    assert not other.peer_proof_fits(TOKEN, HANDSHAKE.peer_proof(TOKEN))
    sealed = HANDSHAKE.seal(TOKEN, b"k" * 32)
    assert not other.coordinator_proof_fits(TOKEN, sealed, HANDSHAKE.coordinator_proof(TOKEN, sealed))


def test_moving_a_character_to_the_next_field_changes_the_proof() -> None:
    a = msgspec.structs.replace(HANDSHAKE, run="ab", peer="c")
    b = msgspec.structs.replace(HANDSHAKE, run="a", peer="bc")
    assert a.peer_proof(TOKEN) != b.peer_proof(TOKEN)


def test_a_proof_cannot_be_sent_back() -> None:
    sealed = HANDSHAKE.seal(TOKEN, b"k" * 32)
    assert not HANDSHAKE.coordinator_proof_fits(TOKEN, sealed, HANDSHAKE.peer_proof(TOKEN))
    assert not HANDSHAKE.peer_proof_fits(TOKEN, HANDSHAKE.coordinator_proof(TOKEN, sealed))


@pytest.mark.parametrize("nonce", [b"", b"c" * 31, b"c" * 33])
def test_a_nonce_of_another_length_does_not_fit(nonce: bytes) -> None:
    other = msgspec.structs.replace(HANDSHAKE, client_nonce=nonce)
    assert not other.peer_proof_fits(TOKEN, other.peer_proof(TOKEN))


@pytest.mark.parametrize("proof", [b"", b"x", b"x" * 32, b"x" * 1000])
def test_nonsense_does_not_fit(proof: bytes) -> None:
    assert not HANDSHAKE.peer_proof_fits(TOKEN, proof)


def test_the_session_key_is_sealed_for_token_holders_only() -> None:
    key = auth.new_session_key()
    sealed = HANDSHAKE.seal(TOKEN, key)
    assert sealed != key
    assert HANDSHAKE.unseal(TOKEN, sealed) == key
    assert HANDSHAKE.unseal(TOKEN + b"x", sealed) != key


def test_a_changed_seal_does_not_fit_the_coordinators_proof() -> None:
    sealed = HANDSHAKE.seal(TOKEN, auth.new_session_key())
    proof = HANDSHAKE.coordinator_proof(TOKEN, sealed)
    flipped = bytes([sealed[0] ^ 1]) + sealed[1:]
    assert HANDSHAKE.coordinator_proof_fits(TOKEN, sealed, proof)
    assert not HANDSHAKE.coordinator_proof_fits(TOKEN, flipped, proof)
    assert not HANDSHAKE.coordinator_proof_fits(TOKEN, b"", HANDSHAKE.coordinator_proof(TOKEN, b""))


def test_fresh_secrets_differ_and_new_tokens_are_long_enough() -> None:
    tokens = {auth.new_token() for _ in range(8)}
    assert len(tokens) == 8
    for token in tokens:
        auth.check_token(token.encode())
    assert auth.new_nonce() != auth.new_nonce()


def test_a_short_token_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match="has 7 characters and needs at least 16; make one with") as caught:
        auth.check_token(b"hunter2")
    assert "hunter2" not in str(caught.value)
