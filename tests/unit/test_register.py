"""Tokens and certificates as the coordinator's register has them: who is let in, and until when."""

from __future__ import annotations

import msgspec
import pytest

from atoll.errors import ConfigError
from atoll.membership.register import CERTIFICATE_S, Register, Scope, Unknown, parse_token
from atoll.membership.steps import EvictionDecided, JournalRecord, TokenMade, TokenRevoked


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def register_with(clock: Clock, scope: Scope = "join", for_s: float = 0.0) -> tuple[Register, TokenMade, str]:
    register = Register(wall_time_s=clock)
    made, text = register.make_token(scope, for_s)
    register.learn(made)
    return register, made, text


def test_a_token_lets_in_whoever_holds_it_and_nobody_else() -> None:
    register, made, text = register_with(Clock())
    token = parse_token(text.encode())
    assert register.key_of(token.id) == token.key
    with pytest.raises(Unknown, match="does not fit"):
        register.key_of("00000000")
    assert text.partition(".")[2].encode() not in msgspec.msgpack.encode(made), (
        "the secret is journaled nowhere"
    )
    assert token.key.hex() not in repr(token) + repr(made)


@pytest.mark.parametrize(
    ("holds", "needs", "allowed"),
    [
        ("watch", "watch", True), ("watch", "join", False), ("watch", "admin", False),
        ("join", "watch", True), ("join", "join", True), ("join", "admin", False),
        ("admin", "watch", True), ("admin", "join", True), ("admin", "admin", True),
    ],
)  # fmt: skip
def test_scopes(holds: Scope, needs: Scope, allowed: bool) -> None:
    register, made, _ = register_with(Clock(), holds)
    if allowed:
        assert register.key_of(made.id, needs) == made.key
    else:
        with pytest.raises(Unknown, match=f"may {holds}, and this needs one that may {needs}"):
            register.key_of(made.id, needs)


def test_a_token_expires_by_the_coordinators_clock() -> None:
    clock = Clock()
    register, made, _ = register_with(clock, for_s=3600)
    clock.now_s += 3599
    register.key_of(made.id)
    clock.now_s += 7201
    with pytest.raises(Unknown, match="expired 2 hours ago"):
        register.key_of(made.id)
    (shown,) = register.tokens()
    assert shown.left_s == -7200


def test_a_revoked_token_is_over_and_others_are_not() -> None:
    register, made, _ = register_with(Clock())
    other, _ = register.make_token("join")
    register.learn(other, TokenRevoked(made.id))
    with pytest.raises(Unknown, match="was revoked"):
        register.key_of(made.id)
    register.key_of(other.id)
    assert "no token 'nothing'" in register.refusal_to_revoke("nothing")


def test_all_is_known_again_from_the_journal() -> None:
    clock = Clock()
    register, made, _ = register_with(clock, for_s=60)
    certified = register.certified(0xABC, "bern", made.id)
    records: tuple[JournalRecord, ...] = (made, certified, TokenRevoked(made.id))
    decoder = msgspec.msgpack.Decoder(JournalRecord)
    again = Register(wall_time_s=clock)
    again.learn(*(decoder.decode(msgspec.msgpack.encode(each)) for each in records))
    (shown,) = again.tokens()
    assert (shown.revoked, shown.peers) == (True, ("bern",))
    assert again.certificate("abc") == certified


def test_an_evicted_peers_certificates_are_over() -> None:
    register, made, _ = register_with(Clock())
    register.learn(
        *(register.certified(n, peer, made.id) for n, peer in ((1, "bern"), (2, "bern"), (3, "oslo")))
    )
    register.learn(EvictionDecided(peer="bern", reason="", for_s=0.0))
    for serial in ("1", "2"):
        with pytest.raises(Unknown, match="not in this run's register"):
            register.certificate(serial)
    assert register.certificate("3").peer == "oslo"


def test_the_older_certificate_counts_until_the_newer_one_was_seen() -> None:
    clock = Clock()
    register, made, _ = register_with(clock)
    register.learn(register.certified(1, "bern", made.id))
    clock.now_s += 10
    register.learn(register.certified(2, "bern", made.id))
    register.certificate("1")  # the answer with the second may have been lost
    register.seen("2")
    with pytest.raises(Unknown):
        register.certificate("1")
    register.certificate("2")


def test_a_name_belongs_to_whoever_came_by_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    register, made, _ = register_with(clock)
    other, _ = register.make_token("join")
    register.learn(other, register.certified(1, "bern", made.id))
    assert register.refusal_to_certify("bern", made.id) == ""
    assert register.refusal_to_certify("oslo", other.id) == ""
    assert "came by another token" in register.refusal_to_certify("bern", other.id)
    clock.now_s += CERTIFICATE_S + 1
    assert register.refusal_to_certify("bern", other.id) == "", "nobody has renewed it"
    monkeypatch.setattr("atoll.membership.register.MOST_CERTIFICATES", 1)
    assert register.refusal_to_certify("oslo", other.id) == "", "what is over takes no place"
    register.learn(register.certified(2, "bern", other.id))
    assert "gives no more" in register.refusal_to_certify("oslo", other.id)


def test_a_name_is_free_again_once_the_token_it_came_by_is_over() -> None:
    clock = Clock()
    register, made, _ = register_with(clock, for_s=60)
    other, _ = register.make_token("join")
    register.learn(other, register.certified(1, "bern", made.id))
    assert register.refusal_to_certify("bern", other.id)
    clock.now_s += 61
    assert register.refusal_to_certify("bern", other.id) == ""


def test_who_only_looks_takes_a_place_for_minutes() -> None:
    clock = Clock()
    register, made, _ = register_with(clock)
    register.learn(register.certified(1, "!doctor-1", made.id), register.certified(2, "bern", made.id))
    assert register.tokens()[0].peers == ("bern",)
    clock.now_s += 601
    with pytest.raises(Unknown, match="was not renewed"):
        register.certificate("1")
    register.certificate("2")


def test_an_eviction_takes_the_certificate_of_the_peers_vpn_too() -> None:
    register, made, _ = register_with(Clock())
    register.learn(register.certified(1, "bern.vpn", made.id))
    assert register.knows("bern")
    register.learn(EvictionDecided(peer="bern", reason="", for_s=0.0))
    assert not register.knows("bern")
    with pytest.raises(Unknown):
        register.certificate("1")


def test_tokens_that_a_broken_start_left_are_known_again() -> None:
    register = Register(wall_time_s=Clock())
    made, text = register.make_token("join", 60, "made with the run")
    assert register.known_token("join", text.encode(), 60) == made
    assert register.known_token("join", b"") is None
    assert register.known_token("join", b"nonsense") is None


def test_a_certificate_that_nobody_renews_is_over() -> None:
    clock = Clock()
    register, made, _ = register_with(clock)
    register.learn(register.certified(1, "bern", made.id))
    assert register.renew_s("1") == CERTIFICATE_S / 3
    clock.now_s += CERTIFICATE_S / 2
    assert register.renew_s("1") == 0
    register.certificate("1")
    clock.now_s += CERTIFICATE_S / 2 + 1
    with pytest.raises(Unknown, match="was not renewed for 30 days"):
        register.certificate("1")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x" * 43, "has no dot"),
        ("abc.", "first part has 3 characters"),
        ("0123abcd.short", "second part has 5 characters"),
        ("0123ab_d." + "x" * 43, "first part"),
    ],
)
def test_a_broken_token_is_told_which_part_and_never_shown(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as found:
        parse_token(text.encode())
    assert text not in str(found.value)


@pytest.mark.parametrize(
    ("scope", "for_s", "note", "says"),
    [
        ("root", 0.0, "", "is one of watch, join, admin"),
        ("join", -1.0, "", "cannot last -1 s"),
        ("join", float("nan"), "", "cannot last nan s"),
        ("join", 0.0, "x" * 121, "one line of at most"),
        ("join", 0.0, "a\nb", "one line of at most"),
        ("join", 0.0, "the lab in Bern", ""),
    ],
)
def test_tokens_that_cannot_be_made(scope: str, for_s: float, note: str, says: str) -> None:
    refusal = Register().refusal_to_make(scope, for_s, note)
    assert (says in refusal) if says else not refusal


def test_a_run_without_tls_has_one_token() -> None:
    register = Register.of_one(b"secret of all")
    assert register.key_of("", "admin") == b"secret of all"
