"""How a peer belongs to a run with an authority: it enrols once, and shows its certificate from then on.

The first contact is checked by the fingerprint in the join line (`network.pinning`). Then the peer proves its token,
and the coordinator certifies a key that never leaves this process, but for a file of mode 0600 in the run's folder: who
starts again with it needs no token, also when that has expired by now. Rank 0 has the one that the coordinator knows
the peer by; further ranks enrol too, for their engines.
"""

from __future__ import annotations

import os
import ssl
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from atoll import log
from atoll.addresses import split_address, split_addresses
from atoll.comm.native import Tls, tls_is_built
from atoll.errors import ConfigError, LocalError, Refused
from atoll.membership.auth import certificate_key
from atoll.membership.link import Secure
from atoll.membership.operator import Done, Enrol, Enrolled, Reply
from atoll.membership.operator_link import ask_leader, decided
from atoll.network.authority import COORDINATOR, Identity, check_fingerprint, der_of, is_authority, new_key
from atoll.network.pinning import fetch_authority
from atoll.network.tls import client_context

FOLDER = "identity"
CONNECT_S = 10.0

_log = log.get(__name__)


def secure_way(
    address: str, fingerprint: str, *, connect_s: float = CONNECT_S, wait_s: float = 0.0
) -> Secure | None:
    """How to speak to the coordinators at `address` as one who holds a token: by TLS, once their authority has shown to
    be the one with this fingerprint. None if there is no fingerprint: the run has no authority.

    Blocks at most `max(connect_s, wait_s)`. Raises Refused (another authority), Unreachable, ConfigError.
    """
    if not fingerprint:
        return None
    return _token_way(_authority_at(address, fingerprint, connect_s, wait_s))


def _authority_at(address: str, fingerprint: str, connect_s: float, wait_s: float) -> str:
    """The certificate of the run's authority (PEM), which has this fingerprint."""
    places = [split_address(each) for each in split_addresses(address)]
    return fetch_authority(places, check_fingerprint(fingerprint), connect_s=connect_s, wait_s=wait_s)


def _token_way(authority: str) -> Secure:
    """For one who holds a token, and has no certificate."""
    return Secure(context=client_context(authority), server_name=COORDINATOR)


@dataclass(frozen=True, slots=True)
class Badge:
    """What this rank of a peer shows. `file` is where it is kept, None: nowhere."""

    run: str
    peer: str
    identity: Identity
    file: Path | None

    @property
    def secure(self) -> Secure:
        """For connections to the coordinator."""
        identity = self.identity
        context = client_context(identity.authority, identity)
        return Secure(
            context=context, server_name=COORDINATOR, key=certificate_key(der_of(identity.certificate))
        )

    @property
    def tls(self) -> Tls:
        """For the engine."""
        return Tls(self.identity.certificate, self.identity.key, self.identity.authority, named=True)

    async def renew(self, address: str, secure: Secure) -> tuple[Secure, float]:
        """Another certificate for the same peer. The engine and the sidecar keep the one they have: whom they let in is
        a matter of the session key, which only those get whom the coordinator still lets in."""
        key, public = new_key()
        reply = await decided(address, b"", Enrol(self.run, self.peer, public), secure)
        badge = _badge(self.run, self.peer, reply, key, self.identity.authority, self.file)
        assert isinstance(reply, Enrolled)
        return badge.secure, reply.renew_s


def enrol(
    address: str,
    *,
    run: str,
    peer: str,
    token: bytes,
    fingerprint: str,
    folder: Path | None,
    rank: int = 0,
    wait_s: float = 0.0,
) -> Badge:
    """A certificate for this peer: by the one it has from an earlier start, if that still counts, else by `token`.

    Blocks at most `wait_s`, or some 10 s for each of up to three tries. Raises Refused, Unreachable, ConfigError, and
    LocalError if this build of the engine cannot speak TLS, or the file cannot be written.
    """
    if not tls_is_built():
        raise LocalError(
            "this build of Atoll has no TLS, and this run needs it: install OpenSSL's headers (Debian: libssl-dev) "
            "and build again"
        )
    wanted = check_fingerprint(fingerprint)
    file = _file(folder, peer, rank)
    held = _load(file, wanted)
    if held is not None and rank > 0:
        return Badge(run, peer, held, file)  # for its engine alone: the coordinator never sees it
    key, public = new_key()
    request = Enrol(run, peer, public)
    if held is not None:
        try:
            secure = Badge(run, peer, held, file).secure
            reply = ask_leader(address, b"", request, secure, wait_s=wait_s)
            return _badge(run, peer, reply, key, held.authority, file)
        except Refused as refusal:
            if not token:
                raise
            _log.warning("the certificate in %s is no use (%s); joining with the token", file, refusal)
    if not token:
        raise Refused(
            "no token, and no certificate from an earlier start: set ATOLL_TOKEN, or name a file by --token-file"
        )
    authority = _authority_at(address, wanted, CONNECT_S, wait_s)
    reply = ask_leader(address, token, request, _token_way(authority), wait_s=wait_s)
    return _badge(run, peer, reply, key, authority, file)


def way_in(
    address: str, *, peer: str, token: bytes, fingerprint: str, folder: Path, wait_s: float = 0.0
) -> tuple[bytes, Secure | None]:
    """How to ask a run something before this peer is part of it: by `token`, or, where there is none, by the
    certificate of an earlier start. Raises as `secure_way`."""
    held = _load(_file(folder, peer, 0), check_fingerprint(fingerprint)) if fingerprint and peer else None
    if held is not None and not token:
        return b"", Badge("", peer, held, None).secure
    return token, secure_way(address, fingerprint, wait_s=wait_s)


def _file(folder: Path | None, peer: str, rank: int) -> Path | None:
    return folder / FOLDER / f"{urllib.parse.quote(peer, safe='')}.{rank}.pem" if folder is not None else None


def _badge(run: str, peer: str, reply: Reply, key: str, authority: str, file: Path | None) -> Badge:
    if not isinstance(reply, Enrolled):
        raise Refused(reply.reason if isinstance(reply, Done) else "the coordinator gave no certificate")
    badge = Badge(run, peer, Identity(reply.certificate, key, authority), file)
    if file is not None:
        _store(file, badge.identity)
    return badge


def _load(file: Path | None, fingerprint: str) -> Identity | None:
    """The identity of an earlier start, if it is one of this authority."""
    try:
        text = file.read_text() if file is not None else ""
    except (OSError, ValueError):
        return None
    parts = text.split("\f")
    if len(parts) != 3 or not is_authority(parts[1], fingerprint):
        return None
    identity = Identity(parts[0], parts[2], parts[1])
    try:
        client_context(identity.authority, identity)
        der_of(identity.certificate)
    except (ssl.SSLError, ValueError, ConfigError):
        _log.warning("%s is damaged; this peer needs its token again", file)
        return None
    return identity


def _store(file: Path, identity: Identity) -> None:
    new = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as to:
            to.write("\f".join((identity.certificate, identity.authority, identity.key)))
        new.replace(file)
    except OSError as error:
        raise LocalError(
            f"cannot keep this peer's key in {file}: {(error.strerror or str(error)).lower()}"
        ) from None
