"""What the DHT says of a run: where its coordinator is, signed by the run's authority. Pure: values in, bytes out.

A record is one datagram's worth of msgpack: an array of run, addresses, term, sequence, the authority's public key and
its signature over the label and all the others. It has one encoding only, and who reads it checks size, form and
signature before anything else is done with it; nothing in it is trusted that the signature does not cover.

A run's *key* is where its record lies in the DHT: SHA-256 over label, run and the authority's fingerprint, cut to the
160 bits of Kademlia. So another authority's records of a run of the same name lie elsewhere.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from atoll.errors import ConfigError
from atoll.network.authority import Authority

MAX_BYTES: Final = 1024
"""With Kademlia's own bytes around it a record still fits one datagram that no link cuts (1,280 bytes)."""
MAX_ADDRESSES: Final = 8
KEY_BYTES: Final = 20
_LABEL: Final = "atoll dht record 1"
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")

_Counter = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class RecordError(ValueError):
    """Why some bytes are no record: in one short phrase, of a fixed set (`dht_store` counts them)."""


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A checked record. Of two, the one with the higher `age` is the newer, whatever any clock says."""

    run: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=261)], ...],
        msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES),
    ]
    term: _Counter
    sequence: _Counter
    public_key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]

    @property
    def age(self) -> tuple[int, int]:
        """(term, sequence): a coordinator that starts raises its term, one that moves its sequence."""
        return self.term, self.sequence

    @property
    def key(self) -> bytes:
        return key_of(self.run, _fingerprint(self.public_key))


_decoder = msgspec.msgpack.Decoder(Record)


def key_of(run: str, fingerprint: str) -> bytes:
    """Where the record of a run lies whose authority has this fingerprint ("sha256:" and 64 digits)."""
    return hashlib.sha256(msgspec.msgpack.encode((_LABEL, run, fingerprint))).digest()[:KEY_BYTES]


def sign(authority: Authority, *, run: str, addresses: Sequence[str], term: int, sequence: int) -> bytes:
    """A record, signed. Raises ConfigError if it is too long, or an address is none that others could dial."""
    for address in addresses:
        if not is_dialable(address):
            raise ConfigError(
                f"{address!r} cannot be published as the coordinator's address: it has to be host:port as others "
                "reach it; see --advertise"
            )
    public = x509.load_pem_x509_certificate(authority.certificate.encode()).public_key()
    assert isinstance(public, Ed25519PublicKey), "an authority's key is Ed25519"
    key = public.public_bytes_raw()
    signature = authority.sign(_signed(run, tuple(addresses), term, sequence, key))
    data = msgspec.msgpack.encode(Record(run, tuple(addresses), term, sequence, key, signature))
    try:
        read(data)
    except RecordError as error:
        raise ConfigError(
            f"the record of run {run!r} with {len(addresses)} addresses cannot be published: {error}; give at most "
            f"{MAX_ADDRESSES} short addresses"
        ) from None
    return data


def read(data: bytes) -> Record:
    """The record in `data`, with its signature checked. Raises RecordError.

    Says nothing about *whose* record it is: compare `key` with the one that was asked for.
    """
    if len(data) > MAX_BYTES:
        raise RecordError("too long")
    try:
        record = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        raise RecordError("no record") from None
    if msgspec.msgpack.encode(record) != data:
        raise RecordError("not in the one encoding")
    if not all(is_dialable(address) for address in record.addresses):
        raise RecordError("an address that cannot be dialled")
    signed = _signed(record.run, record.addresses, record.term, record.sequence, record.public_key)
    try:
        Ed25519PublicKey.from_public_bytes(record.public_key).verify(record.signature, signed)
    except (ValueError, InvalidSignature):
        raise RecordError("wrongly signed") from None
    return record


def is_dialable(address: str) -> bool:
    """Whether it is `host:port`, `v4:port` or `[v6]:port`, of one machine. Looks nothing up."""
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536):
        return False
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        found = ipaddress.ip_address(bare)
    except ValueError:
        return _NAME.fullmatch(host) is not None
    return (
        (found.version == 6) == (bare is not host)
        and "%" not in bare
        and not (found.is_unspecified or found.is_multicast)
    )


def _signed(run: str, addresses: tuple[str, ...], term: int, sequence: int, public_key: bytes) -> bytes:
    return msgspec.msgpack.encode((_LABEL, run, addresses, term, sequence, public_key))


def _fingerprint(public_key: bytes) -> str:
    """As `authority.fingerprint_of` gives it for that authority's certificate."""
    shown = Ed25519PublicKey.from_public_bytes(public_key).public_bytes(
        Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    )
    return f"sha256:{hashlib.sha256(shown).hexdigest()}"
