"""Proof of the run's session key on every request to a sidecar, and on every reply. Pure: values in, text out.

A sidecar draws a nonce for each connection and tells it to strangers, with the 401 that is all they get. A request
proves, by HMAC-SHA256 under the session key, that its sender holds the key and means this donor, this connection and
these bytes. Its *count* rises with every request of a connection, so a recorded proof is worth nothing, neither on the
same connection nor on another one; no clocks are compared. The reply's proof covers status, length and, for what is
small, the body, under the client's nonce: whoever else answers at a donor's address cannot make it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import struct
from typing import Final

import msgspec

NONCE_BYTES: Final = 16
SCHEME: Final = "Atoll"
REPLY_HEADER: Final = "Atoll-Proof"

_REQUEST = b"atoll sidecar request"
_REPLY = b"atoll sidecar reply"
_CREDENTIALS = re.compile(r"Atoll ([0-9a-f]{32}) (\d{1,15}) ([0-9a-f]{64})")
_CHALLENGE = re.compile(r"Atoll ([0-9a-f]{32})")


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as both sides see it. `byte_range` is the Range header, "" for none."""

    run: str
    donor: str
    method: str
    target: str
    byte_range: str
    server_nonce: bytes
    client_nonce: bytes
    count: int

    def credentials(self, session_key: bytes) -> str:
        """The value of the Authorization header."""
        return f"{SCHEME} {self.client_nonce.hex()} {self.count} {self._proof(session_key)}"

    def fits(self, session_key: bytes, proof: str) -> bool:
        return hmac.compare_digest(self._proof(session_key), proof)

    def reply_proof(self, session_key: bytes, status: int, size_bytes: int, body: bytes | None) -> str:
        """The value of the Atoll-Proof header. `body` None: it is checked by other means (digest tables)."""
        content = hashlib.sha256(body).digest() if body is not None else b""
        return _mac(
            session_key, _REPLY, *self._fields(), str(status).encode(), str(size_bytes).encode(), content
        )

    def reply_fits(
        self, session_key: bytes, proof: str, status: int, size_bytes: int, body: bytes | None
    ) -> bool:
        return hmac.compare_digest(self.reply_proof(session_key, status, size_bytes, body), proof)

    def _proof(self, session_key: bytes) -> str:
        return _mac(session_key, _REQUEST, *self._fields())

    def _fields(self) -> tuple[bytes, ...]:
        about = (self.run, self.donor, self.method, self.target, self.byte_range)
        return (
            *(field.encode() for field in about),
            self.server_nonce,
            self.client_nonce,
            str(self.count).encode(),
        )


def parse_credentials(header: str) -> tuple[bytes, int, str] | None:
    """Client nonce, count and proof of an Authorization header; None for anything else."""
    found = _CREDENTIALS.fullmatch(header)
    return (bytes.fromhex(found[1]), int(found[2]), found[3]) if found else None


def challenge(server_nonce: bytes) -> str:
    """The value of the WWW-Authenticate header."""
    return f"{SCHEME} {server_nonce.hex()}"


def parse_challenge(header: str) -> bytes | None:
    found = _CHALLENGE.fullmatch(header)
    return bytes.fromhex(found[1]) if found else None


def _mac(key: bytes, *fields: bytes) -> str:
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for field in fields:
        mac.update(struct.pack("<I", len(field)))  # so that no two lists of fields read alike
        mac.update(field)
    return mac.hexdigest()
