"""Proof of the run's token, both ways, without sending it; and the sealed session key. Pure: bytes in, bytes
out.

Both sides draw a nonce for each connection. A *proof* is an HMAC-SHA256 under the token over a label of its
direction and everything that the connection is about, so it is worth nothing on another connection, for
another peer, or in the other direction. The coordinator's proof also covers the *sealed* session key: the
run's key for the engines, XORed with a pad that only holders of the token can compute for these two nonces.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

import msgspec

from atoll.errors import ConfigError

MIN_TOKEN_CHARS = 16
MAX_NAME_CHARS = 128
NONCE_BYTES = 32
SESSION_KEY_BYTES = 32

_PEER = b"atoll peer"
_COORDINATOR = b"atoll coordinator"
_SEAL = b"atoll seal"
_OPERATOR = b"atoll operator"
_TO_OPERATOR = b"atoll coordinator to operator"


def new_token() -> str:
    """A fresh run token: 43 characters that are safe in files, shells and URLs."""
    return secrets.token_urlsafe(32)


def check_token(token: bytes) -> None:
    """Raises ConfigError if the token is too short to resist guessing. The message never holds the token."""
    if len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(
            f"the run token has {len(token)} characters and needs at least {MIN_TOKEN_CHARS}; "
            "make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )


def certificate_key(der: bytes) -> bytes:
    """What stands in for the token where both ends have shown certificates. It is no secret: TLS has proved both."""
    return hashlib.sha256(b"atoll certificate" + der).digest()


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def new_session_key() -> bytes:
    return secrets.token_bytes(SESSION_KEY_BYTES)


class Handshake(msgspec.Struct, frozen=True, kw_only=True):
    """What one connection is about; both sides must hold equal values for a proof to fit."""

    protocol: int
    run: str
    peer: str
    incarnation: str
    server_nonce: bytes
    client_nonce: bytes

    def peer_proof(self, token: bytes) -> bytes:
        return self._mac(token, _PEER)

    def peer_proof_fits(self, token: bytes, proof: bytes) -> bool:
        fresh = len(self.client_nonce) == NONCE_BYTES == len(self.server_nonce)
        return hmac.compare_digest(self.peer_proof(token), proof) and fresh

    def coordinator_proof(self, token: bytes, sealed_session_key: bytes) -> bytes:
        return self._mac(token, _COORDINATOR, sealed_session_key)

    def coordinator_proof_fits(self, token: bytes, sealed_session_key: bytes, proof: bytes) -> bool:
        whole = len(sealed_session_key) == SESSION_KEY_BYTES
        return hmac.compare_digest(self.coordinator_proof(token, sealed_session_key), proof) and whole

    def seal(self, token: bytes, session_key: bytes) -> bytes:
        """Hide the session key from whoever lacks the token; applied twice it gives the key back."""
        pad = self._mac(token, _SEAL)
        return bytes(a ^ b for a, b in zip(pad, session_key, strict=True))

    unseal = seal

    def _mac(self, token: bytes, label: bytes, *more: bytes) -> bytes:
        about = (self.run.encode(), self.peer.encode(), self.incarnation.encode())
        return _mac(
            token, label, str(self.protocol).encode(), *about, self.server_nonce, self.client_nonce, *more
        )


class OperatorHandshake(msgspec.Struct, frozen=True, kw_only=True):
    """The same for an operator, who is no peer and receives no key. Its labels make a proof worth nothing elsewhere."""

    protocol: int
    server_nonce: bytes
    client_nonce: bytes

    def operator_proof(self, token: bytes) -> bytes:
        return self._mac(token, _OPERATOR)

    def operator_proof_fits(self, token: bytes, proof: bytes) -> bool:
        fresh = len(self.client_nonce) == NONCE_BYTES == len(self.server_nonce)
        return hmac.compare_digest(self.operator_proof(token), proof) and fresh

    def coordinator_proof(self, token: bytes) -> bytes:
        return self._mac(token, _TO_OPERATOR)

    def coordinator_proof_fits(self, token: bytes, proof: bytes) -> bool:
        return hmac.compare_digest(self.coordinator_proof(token), proof)

    def _mac(self, token: bytes, label: bytes) -> bytes:
        return _mac(token, label, str(self.protocol).encode(), self.server_nonce, self.client_nonce)


def _mac(token: bytes, *fields: bytes) -> bytes:
    mac = hmac.new(token, digestmod=hashlib.sha256)
    for field in fields:
        mac.update(struct.pack("<I", len(field)))  # so that no two lists of fields read alike
        mac.update(field)
    return mac.digest()
