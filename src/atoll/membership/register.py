"""Whom the coordinator lets in: tokens and certificates, as the journal tells them.

A *token* is `ID.SECRET`. Whoever holds it proves so by its key, and may do what its scope says: `watch` looks, `join`
takes part too, `admin` gives orders too. A *certificate* is known by its serial. Neither ends by a verifier's clock:
the coordinator alone says which still count, by its own clock (a token's expiry, a certificate that nobody renewed),
by revocation, and by eviction. Records go in, decisions come out; the caller journals what `make_...` returns before it
shows it to `learn`.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Final, Literal

import msgspec

from atoll.errors import ConfigError
from atoll.membership.operator import TokenStatus
from atoll.membership.steps import (
    Certified,
    EvictionDecided,
    JournalRecord,
    TokenMade,
    TokenRevoked,
)

Scope = Literal["watch", "join", "admin"]
_RANK: Final[dict[str, int]] = {"watch": 0, "join": 1, "admin": 2}
TRANSIENT: Final = "!"
"""Names that begin so are of those who look once (`atoll doctor`): their certificates count for TRANSIENT_S, and are in
no journal."""
TRANSIENT_S: Final = 600.0
VPN_SUFFIX: Final = ".vpn"
"""A peer's machine in the VPN has a certificate of its own, with the peer's name and this."""
MOST_TOKENS: Final = 1000
MOST_CERTIFICATES: Final = 20_000
MAX_NOTE_CHARS: Final = 120
CERTIFICATE_S: Final = 30 * 86400.0
"""A certificate that was not renewed for so long counts no more. Members renew theirs after a third of it."""
_ID_BYTES: Final = 4
_LABEL: Final = b"atoll token key\0"


class Token(msgspec.Struct, frozen=True):
    """A token as its holder has it. `repr` shows no secret."""

    id: str
    key: bytes

    def __repr__(self) -> str:
        return f"Token({self.id})"


class Unknown(Exception):
    """Not admitted: `reason` is a sentence for whoever asks."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def parse_token(text: bytes) -> Token:
    """`ID.SECRET` as its holder uses it. The secret itself is never sent, only proofs by its key. Raises ConfigError,
    saying which part is wrong, and never the secret."""
    id_, dot, secret = text.partition(b".")
    if not dot:
        raise ConfigError(
            f"the token has no dot: one of a run with TLS is ID.SECRET, and this has {len(text)} characters; "
            "take the one that `atoll coordinator --new` or `atoll token create` printed"
        )
    if not id_.isalnum() or len(id_) != 2 * _ID_BYTES or not id_.isascii():
        raise ConfigError(
            f"the token's first part has {len(id_)} characters and needs {2 * _ID_BYTES}; copy it whole"
        )
    if len(secret) != 43:
        raise ConfigError(f"the token's second part has {len(secret)} characters and needs 43; copy it whole")
    return Token(id_.decode(), hashlib.sha256(_LABEL + text).digest())


class Register:
    """One coordinator's tokens and certificates."""

    def __init__(
        self, *, wall_time_s: Callable[[], float] = time.time, certificate_s: float | None = None
    ) -> None:
        """`certificate_s` None: CERTIFICATE_S."""
        self._wall_time_s = wall_time_s
        self._certificate_s = CERTIFICATE_S if certificate_s is None else certificate_s
        self._tokens: dict[str, TokenMade] = {}
        self._revoked: set[str] = set()
        self._certificates: dict[str, Certified] = {}

    @classmethod
    def of_one(cls, token: bytes) -> Register:
        """A run without TLS: one token, known to all, that may do everything."""
        register = cls()
        register._tokens[""] = TokenMade("", "admin", token, 0.0, "the run's one token")
        return register

    # ---- tokens --------------------------------------------------------------------------------------------------

    def make_token(self, scope: Scope, for_s: float = 0.0, note: str = "") -> tuple[TokenMade, str]:
        """A fresh token: its record, and its text for the one who will hold it. `for_s` 0: it does not expire."""
        text = f"{secrets.token_hex(_ID_BYTES)}.{secrets.token_urlsafe(32)}"
        token = parse_token(text.encode())
        expires = self._wall_time_s() + for_s if for_s else 0.0
        return TokenMade(token.id, scope, token.key, expires, note), text

    def known_token(self, scope: Scope, text: bytes, for_s: float = 0.0) -> TokenMade | None:
        """The record of a token that somebody holds already; None if that is none."""
        try:
            token = parse_token(text)
        except ConfigError:
            return None
        expires = self._wall_time_s() + for_s if for_s else 0.0
        return TokenMade(token.id, scope, token.key, expires, "made with the run")

    def key_of(self, token_id: str, needs: Scope = "watch") -> bytes:
        """The key that proves this token. Raises Unknown if there is no such token, or if it is over; `needs` is what
        the holder wants to do."""
        made = self._tokens.get(token_id)
        if made is None:
            raise Unknown("the run token does not fit; give this run's token in ATOLL_TOKEN")
        if token_id in self._revoked:
            raise Unknown(f"token {token_id} was revoked; ask the run's organiser for another one")
        if made.expires_unix_s and self._wall_time_s() >= made.expires_unix_s:
            ago_s = self._wall_time_s() - made.expires_unix_s
            raise Unknown(
                f"token {token_id} expired {_span(ago_s)} ago; ask the run's organiser for a new one"
            )
        if _RANK[made.scope] < _RANK[needs]:
            raise Unknown(
                f"token {token_id} may {made.scope}, and this needs one that may {needs}; "
                f"make one with `atoll token create --scope {needs}`"
            )
        return made.key

    def refusal_to_make(self, scope: str, for_s: float, note: str) -> str:
        """Why such a token cannot be made; "" if it can."""
        if scope not in _RANK:
            return f"a token's scope is one of {', '.join(_RANK)}, not {scope!r}"
        if not 0 <= for_s < float("inf"):
            return f"a token cannot last {for_s:g} s"
        if len(note) > MAX_NOTE_CHARS or not note.isprintable():
            return f"a note is one line of at most {MAX_NOTE_CHARS} printable characters"
        if len(self._tokens) >= MOST_TOKENS:
            return f"this run has {MOST_TOKENS} tokens, and cannot have more"
        return ""

    def refusal_to_revoke(self, token_id: str) -> str:
        if token_id in self._tokens:
            return ""
        known = ", ".join(sorted(self._tokens)) or "none"
        return f"this run has no token {token_id!r}; its tokens are: {known}"

    def tokens(self) -> tuple[TokenStatus, ...]:
        """All of them, the ones that are over too."""
        now_s = self._wall_time_s()
        return tuple(
            TokenStatus(
                id=made.id,
                scope=made.scope,
                note=made.note,
                left_s=made.expires_unix_s - now_s if made.expires_unix_s else None,
                revoked=made.id in self._revoked,
                peers=tuple(
                    sorted(
                        {
                            each.peer
                            for each in self._certificates.values()
                            if each.token == made.id and not each.peer.startswith(TRANSIENT)
                        }
                    )
                ),
            )
            for made in self._tokens.values()
        )

    # ---- certificates --------------------------------------------------------------------------------------------

    def certified(self, serial: int, peer: str, token_id: str) -> Certified:
        """The record of a certificate that was just given."""
        return Certified(f"{serial:x}", peer, token_id, self._wall_time_s())

    def certificate(self, serial: str) -> Certified:
        """What is known of a certificate that somebody shows. Raises Unknown if it does not count (any more)."""
        known = self._certificates.get(serial)
        if known is None:
            raise Unknown(
                "its certificate is not in this run's register, or was taken from it; join with a token"
            )
        age_s = self._wall_time_s() - known.made_unix_s
        if age_s > self._lasts_s(known):
            raise Unknown(f"its certificate was not renewed for {_span(age_s)}; join with a token")
        return known

    def refusal_to_certify(self, peer: str, token_id: str) -> str:
        """Why the holder of this token cannot have a certificate for this peer; "" if it can. A name belongs to whoever
        came by it first: others would take the peer's place in the run."""
        now_s = self._wall_time_s()
        self._forget(
            each.serial
            for each in tuple(self._certificates.values())
            if now_s - each.made_unix_s > self._lasts_s(each)
        )
        for each in self._certificates.values():
            if each.peer == peer and each.token != token_id and self._lets_in(each.token, now_s):
                return (
                    f"the name {peer!r} is that of a peer that came by another token; choose another one "
                    "(local.peer), or evict that peer"
                )
        if len(self._certificates) >= MOST_CERTIFICATES:
            return f"this run has {MOST_CERTIFICATES} certificates that count, and gives no more"
        return ""

    def knows(self, peer: str) -> bool:
        """Whether a certificate of this name, or of its machine in the VPN, is here."""
        names = (peer, f"{peer}{VPN_SUFFIX}")
        return any(each.peer in names for each in self._certificates.values())

    def seen(self, serial: str) -> None:
        """Somebody came with this certificate: older ones of the same peer are over. Not sooner: the answer to a
        renewal may be lost."""
        newest = self._certificates.get(serial)
        if newest is None:
            return  # taken away meanwhile
        for each in [
            each
            for each in self._certificates.values()
            if each.peer == newest.peer and each.made_unix_s < newest.made_unix_s
        ]:
            del self._certificates[each.serial]

    def renew_s(self, serial: str) -> float:
        """In how many seconds its holder should ask for another one; 0 if it is over."""
        known = self._certificates.get(serial)
        age_s = self._wall_time_s() - known.made_unix_s if known is not None else self._certificate_s
        return max(0.0, self._certificate_s / 3 - age_s)

    # ---- records -------------------------------------------------------------------------------------------------

    def learn(self, *records: JournalRecord) -> None:
        """Take in what was journaled, in that order. Records that concern others change nothing."""
        for record in records:
            match record:
                case TokenMade():
                    self._tokens[record.id] = record
                case TokenRevoked():
                    self._revoked.add(record.id)
                case Certified():
                    self._certificates[record.serial] = record
                case EvictionDecided(peer=peer):
                    names = (peer, f"{peer}{VPN_SUFFIX}")
                    self._forget(
                        each.serial for each in tuple(self._certificates.values()) if each.peer in names
                    )
                case _:
                    pass

    def _lasts_s(self, certificate: Certified) -> float:
        return TRANSIENT_S if certificate.peer.startswith(TRANSIENT) else self._certificate_s

    def _lets_in(self, token_id: str, now_s: float) -> bool:
        made = self._tokens.get(token_id)
        expired = made is None or bool(made.expires_unix_s and now_s >= made.expires_unix_s)
        return not expired and token_id not in self._revoked

    def _forget(self, serials: Iterable[str]) -> None:
        for serial in serials:
            self._certificates.pop(serial, None)


def _span(seconds: float) -> str:
    """A length of time as people say it."""
    for unit, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"
