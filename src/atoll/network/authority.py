"""Who belongs to a run: its authority, the certificates it gives, and what it signs.

The authority is an Ed25519 key and a certificate signed by itself. Its *fingerprint*, SHA-256 over the public key, is
what a join line carries: whoever knows it can tell the run's coordinator from everybody else (as in `kubeadm join`).
Certificates name a role and a peer. They never expire by a clock: clocks of different machines are never compared, so
the coordinator alone decides which serials still count (`membership.register`).
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import NameOID

from atoll.errors import ConfigError

COORDINATOR: Final = "coordinator.atoll"
"""The name in the coordinator's certificate. No peer's certificate ever holds it."""
_PREFIX: Final = "sha256:"
_FROM: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_UNTIL: Final = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)  # RFC 5280: "no expiry"
_MAX_NAME_CHARS: Final = 64  # of an X.509 common name


def peer_name(peer: str) -> str:
    """The name in a peer's certificate: peers may have names that no DNS name can hold."""
    return f"{hashlib.sha256(peer.encode()).hexdigest()[:32]}.peer.atoll"


@dataclass(frozen=True, slots=True)
class Identity:
    """What one process shows, and whom it believes, in PEM. `repr` shows no key."""

    certificate: str
    key: str = field(repr=False)
    authority: str


def new_key() -> tuple[str, bytes]:
    """A fresh Ed25519 key pair: the private key in PEM, the public one as 32 bytes."""
    key = Ed25519PrivateKey.generate()
    return _pem_of(key), key.public_key().public_bytes_raw()


class Authority:
    """The run's authority, with its private key. Lives where the coordinator does."""

    def __init__(self, key: Ed25519PrivateKey, certificate: x509.Certificate) -> None:
        self._key, self._certificate = key, certificate

    @classmethod
    def new(cls, run: str) -> Authority:
        """A fresh authority for a run."""
        key = Ed25519PrivateKey.generate()
        name = _name(f"atoll run {run}")
        builder = (
            _builder(name, name, key.public_key(), x509.random_serial_number())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
        )
        return cls(key, builder.sign(key, None))

    @classmethod
    def from_pem(cls, pem: bytes) -> Authority:
        """What `to_pem` gave. Raises ConfigError if it is no such thing."""
        try:
            key = serialization.load_pem_private_key(pem, None)
            certificate = x509.load_pem_x509_certificate(pem)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"it holds no authority ({error})") from None
        if not isinstance(key, Ed25519PrivateKey) or certificate.public_key() != key.public_key():
            raise ConfigError("its key and its certificate do not belong together")
        return cls(key, certificate)

    def to_pem(self) -> bytes:
        """Private key and certificate. Whoever reads it can admit anybody: keep it in a file of mode 0600."""
        return _pem_of(self._key).encode() + self.certificate.encode()

    @property
    def certificate(self) -> str:
        """The authority's own certificate in PEM. Public."""
        return self._certificate.public_bytes(serialization.Encoding.PEM).decode()

    @property
    def fingerprint(self) -> str:
        """`sha256:` and 64 hexadecimal digits."""
        return fingerprint_of(self.certificate)

    def certify_peer(self, peer: str, public_key: bytes) -> tuple[str, int]:
        """A certificate in PEM for a peer's own key (32 bytes), and its serial. ValueError for what is no key."""
        return self._certify(peer, peer_name(peer), Ed25519PublicKey.from_public_bytes(public_key))

    def coordinator_identity(self) -> Identity:
        """A fresh key and certificate for a coordinator of this run."""
        key = Ed25519PrivateKey.generate()
        certificate, _ = self._certify("coordinator", COORDINATOR, key.public_key())
        return Identity(certificate, _pem_of(key), self.certificate)

    def sign(self, data: bytes) -> bytes:
        """The authority's word for `data`, 64 bytes. Give each kind of data a label of its own at its beginning."""
        return self._key.sign(data)

    def _certify(self, shown: str, name: str, key: Ed25519PublicKey) -> tuple[str, int]:
        serial = x509.random_serial_number()
        printable = "".join(each for each in shown if each.isprintable())[:_MAX_NAME_CHARS] or "peer"
        builder = (
            _builder(_name(printable), self._certificate.subject, key, serial)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
        )
        certificate = builder.sign(self._key, None)
        return certificate.public_bytes(serialization.Encoding.PEM).decode(), serial


def fingerprint_of(certificate: str | bytes) -> str:
    """The fingerprint of an authority's certificate, PEM or DER. Raises ConfigError if it is no certificate."""
    return _PREFIX + hashlib.sha256(_public_bytes(_read(certificate))).hexdigest()


def der_of(certificate: str) -> bytes:
    """A certificate in PEM as DER. Raises ConfigError if it is none."""
    return _read(certificate).public_bytes(serialization.Encoding.DER)


def check_fingerprint(text: str) -> str:
    """A fingerprint as people paste it, in the one form that is compared. Raises ConfigError, saying which part of it
    is wrong."""
    digits = text.strip().lower().removeprefix(_PREFIX)
    if len(digits) != 64:
        raise ConfigError(
            f"the authority's fingerprint has {len(digits)} digits after {_PREFIX!r} and needs 64; "
            "copy the join line whole"
        )
    if wrong := next((each for each in digits if each not in "0123456789abcdef"), None):
        raise ConfigError(
            f"the authority's fingerprint holds {wrong!r}, which is no hexadecimal digit; copy the join line whole"
        )
    return _PREFIX + digits


def is_authority(certificate: str | bytes, fingerprint: str) -> bool:
    """Whether it is the certificate of the authority with this fingerprint."""
    try:
        return hmac.compare_digest(fingerprint_of(certificate), fingerprint)
    except ConfigError:
        return False


def is_signed(certificate: str | bytes, data: bytes, signature: bytes) -> bool:
    """Whether the authority with this certificate signed `data`."""
    try:
        key = _read(certificate).public_key()  # of whatever kind
        if not isinstance(key, Ed25519PublicKey):
            return False
        key.verify(signature, data)
    except (ConfigError, InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    return True


def _read(certificate: str | bytes) -> x509.Certificate:
    data = certificate.encode() if isinstance(certificate, str) else certificate
    try:
        if data.lstrip().startswith(b"-----"):
            return x509.load_pem_x509_certificate(data)
        return x509.load_der_x509_certificate(data)
    except ValueError as error:
        raise ConfigError(f"it is no certificate ({error})") from None


def _public_bytes(certificate: x509.Certificate) -> bytes:
    try:
        return certificate.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    except (UnsupportedAlgorithm, ValueError) as error:
        raise ConfigError(f"it is no certificate of an authority ({error})") from None


def _pem_of(key: Ed25519PrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:_MAX_NAME_CHARS])])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: Ed25519PublicKey, serial: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(serial)
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
