"""What the coordinator does for who asks for a certificate or a token. Runs on the coordinator's event loop."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from atoll.events import Event, PeerCertified, TokenChanged
from atoll.membership.auth import MAX_NAME_CHARS
from atoll.membership.operator import (
    Done,
    Enrol,
    Enrolled,
    EvictPeer,
    LeavePeer,
    MakeToken,
    Reply,
    Request,
    RevokeToken,
    SettingsWanted,
    StatusWanted,
    StopRun,
    Tokens,
    TokensWanted,
    TokenText,
    VpnAnnounce,
)
from atoll.membership.register import TRANSIENT, VPN_SUFFIX, Register, Scope, Unknown
from atoll.membership.steps import JournalRecord, TokenRevoked
from atoll.membership.vpn_board import certificate_name

NEEDS: Final[dict[type[Request], Scope]] = {
    StatusWanted: "watch",
    SettingsWanted: "join",
    Enrol: "join",
    StopRun: "admin",
    LeavePeer: "admin",
    EvictPeer: "admin",
    MakeToken: "admin",
    RevokeToken: "admin",
    TokensWanted: "admin",
    VpnAnnounce: "join",
}
"""What a token must allow for each request."""
_BY_CERTIFICATE: Final = (StatusWanted, SettingsWanted, Enrol, VpnAnnounce)
"""What a member may ask without a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """A run's authority as its coordinator uses it: `context` shakes hands with everybody, `authority` is the
    authority's certificate in PEM, `certify(peer, public_key)` gives a certificate in PEM and its serial."""

    context: ssl.SSLContext
    authority: str
    certify: Callable[[str, bytes], tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Holder:
    """Who asks: the holder of a token, or of a peer's certificate (`serial`)."""

    token: str
    peer: str = ""
    serial: str = ""


class Registrar:
    """Keeps the register; each change is journaled before it counts."""

    def __init__(
        self,
        run: str,
        register: Register,
        trust: Trust | None,
        journal: Callable[[JournalRecord], None],
        emit: Callable[[Event], None],
        evicted: Callable[[str], str],
    ) -> None:
        """`evicted(peer)`: why this peer is shut out; "" if it is not."""
        self._run = run
        self._register, self._trust, self._journal, self._emit = register, trust, journal, emit
        self._shut_out = evicted

    def check(self, who: Holder, request: Request) -> None:
        """Raises Unknown if this holder may not ask this, or asks it of another run."""
        if who.serial:
            self._register.certificate(who.serial)
            if not isinstance(request, _BY_CERTIFICATE):
                raise Unknown("a peer's certificate does not allow that; it needs a token that may admin")
        else:
            self._register.key_of(who.token, NEEDS[type(request)])
        if isinstance(request, VpnAnnounce) and who.peer not in ("", certificate_name(request.peer)):
            raise Unknown(f"this is the certificate of {who.peer!r}, not of {request.peer!r}'s VPN")
        if isinstance(request, SettingsWanted | Enrol | VpnAnnounce) and request.run != self._run:
            raise Unknown(
                f"this coordinator runs {self._run!r}, not {request.run!r}; check run.name and the address"
            )

    def reply(self, who: Holder, request: Enrol | MakeToken | RevokeToken | TokensWanted) -> Reply:
        """Do what is asked, by someone who may. Raises LeadLost or LocalError if it cannot be journaled."""
        if self._trust is None:
            return Done(
                False,
                "this run has one token and no authority; it has both if its coordinator is started with --new",
            )
        match request:
            case Enrol():
                return self._enrol(self._trust, who, request)
            case MakeToken():
                return self._make_token(request)
            case RevokeToken(token=token):
                return self._revoke(token)
            case TokensWanted():
                return Tokens(self._register.tokens())

    def _enrol(self, trust: Trust, who: Holder, request: Enrol) -> Reply:
        peer = request.peer
        if not (peer.isprintable() and 0 < len(peer) <= MAX_NAME_CHARS):
            return Done(False, f"a peer's name has 1 to {MAX_NAME_CHARS} printable characters")
        if who.peer and peer != who.peer:
            return Done(False, f"this is the certificate of {who.peer!r}, which cannot become {peer!r}")
        if refusal := self._evicted(peer) or self._register.refusal_to_certify(peer, who.token):
            return Done(False, refusal)
        try:
            certificate, serial = trust.certify(peer, request.public_key)
        except ValueError as error:
            return Done(False, f"its key is no use: {error}")
        kept = self._register.certified(serial, peer, who.token)
        if peer.startswith(TRANSIENT):
            self._register.learn(kept)
        else:
            self._keep(kept)
            self._emit(
                PeerCertified(peer=peer, serial=kept.serial, token=who.token, renewed=bool(who.serial))
            )
        return Enrolled(certificate, self._register.renew_s(kept.serial))

    def _evicted(self, name: str) -> str:
        """Also of a peer's machine in the VPN."""
        return self._shut_out(name) or self._shut_out(name.removesuffix(VPN_SUFFIX))

    def _make_token(self, request: MakeToken) -> Reply:
        refusal = self._register.refusal_to_make(request.scope, request.for_s, request.note)
        if refusal:
            return Done(False, refusal)
        scope: Scope = "watch" if request.scope == "watch" else "join" if request.scope == "join" else "admin"
        made, text = self._register.make_token(scope, request.for_s, request.note)
        self._keep(made)
        self._emit(TokenChanged(token=made.id, scope=made.scope, what="made"))
        return TokenText(made.id, text)

    def _revoke(self, token: str) -> Reply:
        refusal = self._register.refusal_to_revoke(token)
        if refusal:
            return Done(False, refusal)
        (found,) = (each for each in self._register.tokens() if each.id == token)
        if not found.revoked:
            self._keep(TokenRevoked(token))
            self._emit(TokenChanged(token=token, scope=found.scope, what="revoked"))
        stay = f"; {', '.join(found.peers)} came by it and may stay (atoll evict)" if found.peers else ""
        return Done(True, f"nobody can come by token {token} any more{stay}")

    def _keep(self, record: JournalRecord) -> None:
        self._journal(record)
        self._register.learn(record)
