"""The run's authority: certificates that TLS accepts, fingerprints, and signatures."""

from __future__ import annotations

import ssl

import pytest

from atoll.errors import ConfigError
from atoll.network.authority import (
    COORDINATOR,
    Authority,
    Identity,
    check_fingerprint,
    fingerprint_of,
    is_authority,
    is_signed,
    new_key,
    peer_name,
)


def context_of(identity: Identity, purpose: int, tmp_path) -> ssl.SSLContext:
    context = ssl.SSLContext(purpose)
    context.load_verify_locations(cadata=identity.authority)
    file = tmp_path / f"{id(identity)}.pem"
    file.write_text(identity.certificate + identity.key)
    context.load_cert_chain(file)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """A handshake in memory; raises what either end finds."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server, server_hostname=name),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    for end in ends:
        end.do_handshake()


def identity_of(authority: Authority, peer: str) -> Identity:
    key, public = new_key()
    certificate, _ = authority.certify_peer(peer, public)
    return Identity(certificate, key, authority.certificate)


def test_peer_and_coordinator_know_each_other_by_tls(tmp_path) -> None:
    authority = Authority.new("a run")
    server = context_of(authority.coordinator_identity(), ssl.PROTOCOL_TLS_SERVER, tmp_path)
    client = context_of(identity_of(authority, "bern 🦊"), ssl.PROTOCOL_TLS_CLIENT, tmp_path)
    shake_hands(server, client, COORDINATOR)


def test_a_peer_is_not_the_coordinator_nor_another_peer(tmp_path) -> None:
    authority = Authority.new("a run")
    server = context_of(identity_of(authority, COORDINATOR), ssl.PROTOCOL_TLS_SERVER, tmp_path)
    client = context_of(identity_of(authority, "b"), ssl.PROTOCOL_TLS_CLIENT, tmp_path)
    shake_hands(server, client, peer_name(COORDINATOR))
    for name in (COORDINATOR, peer_name("a")):
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            shake_hands(server, client, name)


def test_a_certificate_of_another_run_is_refused_on_both_sides(tmp_path) -> None:
    ours, theirs = Authority.new("a run"), Authority.new("a run")
    server = context_of(ours.coordinator_identity(), ssl.PROTOCOL_TLS_SERVER, tmp_path)
    client = context_of(identity_of(theirs, "b"), ssl.PROTOCOL_TLS_CLIENT, tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, client, COORDINATOR)
    client.verify_mode, client.check_hostname = ssl.CERT_REQUIRED, False
    client.load_verify_locations(cadata=ours.certificate)  # it believes us, we do not believe it
    with pytest.raises(ssl.SSLError, match=r"(?i)certificate"):
        shake_hands(server, client, COORDINATOR)


def test_no_peer_can_certify(tmp_path) -> None:
    """A certificate signed by a peer's key leads to the authority, and is refused: the peer is no authority."""
    authority = Authority.new("a run")
    member = identity_of(authority, "bern")
    usurper = Authority.from_pem((member.key + member.certificate).encode())
    forged = usurper.coordinator_identity()
    chained = Identity(forged.certificate + member.certificate, forged.key, authority.certificate)
    server = context_of(chained, ssl.PROTOCOL_TLS_SERVER, tmp_path)
    client = context_of(identity_of(authority, "b"), ssl.PROTOCOL_TLS_CLIENT, tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, client, COORDINATOR)


def test_an_authority_survives_its_file_and_only_its_own() -> None:
    authority = Authority.new("a run")
    again = Authority.from_pem(authority.to_pem())
    assert again.fingerprint == authority.fingerprint == fingerprint_of(authority.certificate)
    assert is_authority(again.certificate, authority.fingerprint)
    assert not is_authority(Authority.new("a run").certificate, authority.fingerprint)
    assert not is_authority("nonsense", authority.fingerprint)
    other = Authority.new("a run")
    mixed = authority.to_pem().split(b"-----BEGIN CERT")[0] + other.certificate.encode()
    for wrong in (b"", b"nonsense", authority.certificate.encode(), mixed):
        with pytest.raises(ConfigError):
            Authority.from_pem(wrong)


def test_signatures() -> None:
    authority = Authority.new("a run")
    signature = authority.sign(b"here")
    assert is_signed(authority.certificate, b"here", signature)
    assert not is_signed(authority.certificate, b"there", signature)
    assert not is_signed(Authority.new("a run").certificate, b"here", signature)
    assert not is_signed(authority.certificate, b"here", b"")


def test_fingerprints_are_read_as_people_paste_them() -> None:
    fingerprint = Authority.new("a run").fingerprint
    for text in (fingerprint, f" {fingerprint.upper()} ", fingerprint.removeprefix("sha256:")):
        assert check_fingerprint(text) == fingerprint
    with pytest.raises(ConfigError, match="has 63 digits"):
        check_fingerprint(fingerprint[:-1])
    with pytest.raises(ConfigError, match="holds 'x'"):
        check_fingerprint(fingerprint[:-1] + "x")


def test_no_key_is_shown() -> None:
    identity = Authority.new("a run").coordinator_identity()
    assert "PRIVATE" in identity.key
    assert "PRIVATE" not in repr(identity)
