"""K10 and the organiser's nightmares: who has no proof gets nothing, over real processes and real sockets.

The run is made with --new: an authority, tokens, TLS everywhere. Strangers come with nothing, with certificates of
another run, with recorded words, with tokens that are over, from in between, and from inside.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from atoll.diloco.badge import FOLDER, Badge, enrol
from atoll.errors import Refused, Unreachable
from atoll.membership.client import Member
from atoll.membership.source_limit import BURST, PER_S
from atoll.network.authority import Authority, Identity, new_key
from atoll.network.tls import server_context
from atoll.recovery import proof
from support.slack import SLACK_S
from support.swarm import Peer, Swarm, close_to
from support.tapping_proxy import TappingProxy
from support.trusted_swarm import TrustedSwarm

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

FOREVER = ["--rounds", 10_000, "--round-s", 0.3]


def listening_ports(peer: Peer) -> list[int]:
    """The engine's and the sidecar's."""
    found = psutil.Process(peer.process.pid).net_connections(kind="tcp")
    return sorted(each.laddr.port for each in found if each.status == psutil.CONN_LISTEN)


def port_of(swarm: Swarm) -> int:
    return int(swarm.address.rpartition(":")[2])


def identity_of(authority: Authority, peer: str) -> Identity:
    key, public = new_key()
    return Identity(authority.certify_peer(peer, public)[0], key, authority.certificate)


def client_context(identity: Identity | None, folder: Path) -> ssl.SSLContext:
    """A client that believes everybody, and shows this."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if identity is not None:
        file = folder / f"{secrets.token_hex(4)}.pem"
        file.write_text(identity.certificate + identity.key)
        context.load_cert_chain(file)
    return context


def heard_in_tls(port: int, context: ssl.SSLContext, words: bytes) -> bytes:
    """What comes back inside TLS; b"" if the other end does not shake hands, or says nothing."""
    heard = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        with context.wrap_socket(plain) as secure:
            secure.settimeout(10)
            secure.sendall(words)
            while data := secure.recv(65536):
                heard += data
    return heard


def heard_in_plain(port: int, words: bytes) -> bytes:
    heard = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        plain.sendall(words)
        plain.shutdown(socket.SHUT_WR)
        while data := plain.recv(65536):
            heard += data
    return heard


@contextlib.contextmanager
def run_of_two(folder: Path, **waits: float) -> Iterator[TrustedSwarm]:
    with TrustedSwarm(folder, start_peers=2, **waits) as swarm:
        a, b = swarm.trusted("a", 1, *FOREVER), swarm.trusted("b", 3, *FOREVER)
        swarm.wait(lambda: a.rounds() and b.rounds(), within_s=60, what="a round")
        yield swarm


def refused(swarm: TrustedSwarm, peer: Peer, says: str) -> None:
    """The peer ends with exit 5 and one line."""
    assert swarm.finish(peer.name, within_s=60) == {peer.name: 5}, peer.output()
    lines = [line for line in peer.output().splitlines() if "W atoll" not in line]
    assert len(lines) == 1, peer.output()
    assert says in lines[0]


def test_a_run_inside_tls_has_the_golden_values_also_for_who_comes_late(tmp_path: Path) -> None:
    go = tmp_path / "go"
    hold = ["--numel", 300_000, "--hold-in-round", 1, "--until", go]
    with TrustedSwarm(tmp_path, start_peers=2) as swarm:
        a, b = swarm.trusted("a", 1, *hold), swarm.trusted("b", 3, *hold)
        swarm.wait(lambda: a.rounds() and b.rounds(), within_s=60, what="the first round")
        c = swarm.trusted("c", 8, "--numel", 300_000, "--mark-ready-in-round", 1)
        swarm.wait_for_marker(c)
        go.touch()
        swarm.finish_well("a", "b", "c")
        assert {event["peer"] for event in swarm.events("PeerCertified")} == {"a", "b", "c"}
    assert close_to(a.thetas(), [1.089297, 3.138991, 4.701726]), a.thetas()
    assert c.thetas() == a.thetas()[1:]
    assert swarm.events("CaughtUp", "c")[0]["received_bytes"] > 300_000
    swarm.assert_one_history()


def test_each_rank_of_a_peer_has_a_certificate(tmp_path: Path) -> None:
    with TrustedSwarm(tmp_path, start_peers=2) as swarm:
        a = swarm.trusted("a", 1, "--numel", 1000, ranks=2)
        b = swarm.trusted("b", 3, "--numel", 1000)
        swarm.finish_well("a", "b")
        assert a.thetas() == b.thetas()
        kept = {path.name for path in (tmp_path / swarm.run / FOLDER).iterdir()}
        assert kept == {"a.0.pem", "a.1.pem", "b.0.pem"}
    assert len({event["serial"] for event in swarm.events("PeerCertified")}) == 3


def test_no_stranger_gets_a_byte(tmp_path: Path) -> None:
    """At the engine and at the sidecar of a member. A certificate of the run alone is not enough either: the key of
    those who take part is."""
    asks = b"GET /v1/held/-1 HTTP/1.1\r\nHost: x\r\n\r\n"
    with run_of_two(tmp_path) as swarm:
        swarm.trusted("late", 8, *FOREVER)  # so that the sidecars run
        swarm.wait(lambda: swarm.events("CaughtUp", "late"), within_s=60, what="a late joiner")
        ports = listening_ports(swarm.peers["a"])
        assert len(ports) == 2
        another_run = identity_of(Authority.new("quadratic"), "b")
        member = identity_of(swarm.authority, "b")
        answers = []
        for port in ports:
            for words in (asks, b"ATOLL-1\n" + bytes(248), b"\x00" * 64):
                plain = heard_in_plain(port, words)
                assert not plain or plain[:1] == b"\x15", f"more than a TLS alert: {plain[:80]!r}"
                assert heard_in_tls(port, client_context(None, tmp_path), words) == b""
                assert heard_in_tls(port, client_context(another_run, tmp_path), words) == b""
                answers.append(heard_in_tls(port, client_context(member, tmp_path), words))
        told = [answer for answer in answers if answer]
        assert told, "the certificate is good: the sidecar says what to prove"
        for answer in told:
            status, _, rest = answer.partition(b"\r\n")
            assert status.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), status
            assert len(rest) < 4096
        version = max(row["version"] for row in swarm.peers["a"].rounds())
        swarm.wait(lambda: swarm.peers["a"].rounds()[-1]["version"] > version + 1, within_s=60, what="rounds")
        swarm.assert_one_history()


def test_a_recorded_join_is_worth_nothing(tmp_path: Path) -> None:
    with TrustedSwarm(tmp_path, start_peers=1) as swarm:
        proxy = TappingProxy(port_of(swarm))
        through = swarm.address
        swarm.address = f"127.0.0.1:{proxy.port}"
        swarm.trusted("a", 1, *FOREVER)
        swarm.wait(lambda: swarm.peers["a"].rounds(), within_s=60, what="a round")
        swarm.address = through
        recorded = [bytes(words) for words in proxy.said if words]
        assert len(recorded) >= 3, "the authority's, the enrolment's and the member's connection"
        certified, joined = len(swarm.events("PeerCertified")), len(swarm.events("PeerJoined"))
        for words in recorded:
            answer = heard_in_plain(port_of(swarm), words)
            # A fresh handshake on the coordinator's side, which the recorded words do not fit.
            assert b"ATOLL" not in answer
            assert len(answer) < 4096
        version = swarm.peers["a"].rounds()[-1]["version"]
        swarm.wait(lambda: swarm.peers["a"].rounds()[-1]["version"] > version + 1, within_s=60, what="rounds")
        assert len(swarm.events("PeerCertified")) == certified
        assert len(swarm.events("PeerJoined")) == joined
        proxy.close()


def test_a_man_in_the_middle_learns_nothing(tmp_path: Path) -> None:
    """With a certificate of his own he sees the one request that says nothing; a newcomer is told, in one line, and its
    token is not put to the proof. Known peers do not even shake hands."""
    with TrustedSwarm(tmp_path, start_peers=1) as swarm:
        his = Authority.new("quadratic")
        proxy = TappingProxy(port_of(swarm), server_context(his.coordinator_identity(), strangers=True))
        honest = swarm.address
        swarm.address = f"127.0.0.1:{proxy.port}"
        seen = swarm.trusted("a", 1)
        # He passes the genuine authority on, since it is public; then nobody believes his own certificate.
        assert swarm.finish("a", within_s=60) == {"a": 4}, seen.output()
        assert "its certificate is not the coordinator's of this run" in seen.output()
        assert proxy.failed_handshakes > 0
        understood = b"".join(bytes(words) for words in proxy.said)
        assert b"/v1/authority" in understood
        assert b"/v1/operator" not in understood
        assert b"/v1/peer" not in understood
        swarm.address = honest
        assert not swarm.events("PeerCertified")
        proxy.close()
        swarm.trusted("a", 1)
        swarm.finish_well("a")


def test_another_authority_is_named_in_one_line(tmp_path: Path) -> None:
    with TrustedSwarm(tmp_path, start_peers=1) as swarm:
        other = Authority.new("quadratic").fingerprint
        peer = swarm.quadratic("a", 1, "--authority", other, "--token-file", swarm.token_file)
        refused(swarm, peer, f"the join line says {other}")


def test_tokens_that_are_over_let_nobody_in(tmp_path: Path) -> None:
    short, revoked, watching = (tmp_path / name for name in ("short", "revoked", "watching"))
    with TrustedSwarm(tmp_path, start_peers=1) as swarm:
        for file, arguments in (
            (short, ["--for", "1s"]),
            (revoked, []),
            (watching, ["--scope", "watch"]),
        ):
            made = swarm.ordered("token", "create", "@", *arguments)
            assert made.returncode == 0, made.stderr
            file.write_text(made.stdout)
        done = swarm.ordered("token", "revoke", "@", revoked.read_text().partition(".")[0])
        assert done.returncode == 0, done.stderr
        listed = swarm.ordered("token", "list", "@").stdout
        assert "revoked" in listed
        assert not any(
            file.read_text().strip().partition(".")[2] in listed for file in (short, revoked, watching)
        )
        swarm.wait(
            lambda: "expired" in swarm.ordered("token", "list", "@").stdout, within_s=30, what="its end"
        )
        refused(swarm, swarm.trusted("x", 1, token_file=short), "expired")
        refused(swarm, swarm.trusted("y", 1, token_file=revoked), "was revoked")
        refused(
            swarm, swarm.trusted("z", 1, token_file=watching), "may watch, and this needs one that may join"
        )
        looked = swarm.ordered("status", "@", token_file=watching)
        assert looked.returncode == 0, looked.stderr
        for words in (("stop", "@"), ("evict", "@", "a"), ("token", "create", "@"), ("token", "list", "@")):
            denied = swarm.ordered(*words, token_file=swarm.token_file)
            assert denied.returncode == 5
            assert "may join, and this needs one that may admin" in denied.stderr
        assert not swarm.events("PeerJoined")
        swarm.trusted("a", 1)
        swarm.finish_well("a")


def files_below(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Every file and what is in it, of a run that goes on: what is gone when it is looked at is left out."""
    for here, _, names in os.walk(folder):
        for path in (Path(here, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    yield path, path.read_bytes()


def test_secrets_are_nowhere(tmp_path: Path) -> None:
    """Not in argv, logs, events, nor in what a watcher is told."""
    with run_of_two(tmp_path) as swarm:
        secret = (swarm.own / "join.token").read_text().strip()
        processes = [psutil.Process(swarm.peers["a"].process.pid), psutil.Process(swarm.coordinator.pid)]
        children = [child for each in processes for child in each.children(recursive=True)]
        assert not any(secret in " ".join(each.cmdline()) for each in [*processes, *children])
        texts = dict(files_below(tmp_path))
        for path, text in texts.items():
            if path.suffix in (".log", ".jsonl", ".results"):
                assert secret.encode() not in text, path
                assert b"PRIVATE KEY" not in text, path
        kept = [path for path, text in texts.items() if b"PRIVATE KEY" in text]
        assert {p.name for p in kept} == {"authority.pem", "a.0.pem", "b.0.pem"}
        assert all(p.stat().st_mode & 0o077 == 0 for p in kept)


def test_a_peer_starts_again_without_a_token_and_a_stolen_name_does_not(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("00000000." + "x" * 43)  # a token that nobody ever made
    with run_of_two(tmp_path) as swarm:
        swarm.peers["b"].send(signal.SIGTERM)
        swarm.finish("b")
        swarm.trusted("b", 3, *FOREVER, token_file=empty)
        swarm.wait(lambda: len(joins(swarm, "b")) == 2, within_s=60, what="b again, by its certificate")
        assert swarm.events("PeerCertified")[-1]["renewed"]
        other = tmp_path / "other"
        other.write_text(swarm.ordered("token", "create", "@").stdout)
        usurper = swarm.quadratic(
            "a2", 9, "--authority", swarm.authority.fingerprint, "--token-file", other, "--peer", "a",
            "--out", tmp_path / "elsewhere",
        )  # fmt: skip
        refused(swarm, usurper, "the name 'a' is that of a peer that came by another token")
        mine = tmp_path / swarm.run / FOLDER / "a.0.pem"
        (mine.parent / "thief.0.pem").write_bytes(mine.read_bytes())
        thief = swarm.trusted("thief", 9, token_file=empty)
        assert swarm.finish("thief", within_s=60) == {"thief": 5}
        assert "does not fit" in thief.output() or "cannot become 'thief'" in thief.output()
        assert not joins(swarm, "thief")


def test_a_member_that_turns_bad_is_evicted_in_mid_round(tmp_path: Path) -> None:
    """It stands still in a transfer. The others go on with another session key: with the old one, and its certificate,
    it gets nothing from their sidecars, and it cannot come back."""
    numel = 500_000
    with TrustedSwarm(tmp_path, start_peers=3, attempt_s=60.0, dead_s=60.0, coordinator_lost_s=90.0) as swarm:
        for name, center in (("a", 1), ("b", 3)):
            swarm.trusted(name, center, *FOREVER, "--numel", numel)
        bad = swarm.trusted("bad", 8, *FOREVER, "--numel", numel, "--mark-reducing-in-round", 2)
        swarm.wait_for_marker(bad)
        bad.send(signal.SIGSTOP)
        version = swarm.peers["a"].rounds()[-1]["version"]
        evicted = swarm.ordered("evict", "@", "bad", "--reason", "it lies")
        assert evicted.returncode == 0, evicted.stderr
        swarm.wait(
            lambda: swarm.peers["a"].rounds()[-1]["version"] > version + 2,
            within_s=60,
            what="rounds of the others",
        )
        last = swarm.peers["a"].rounds()[-1]
        assert "bad" not in last["members"]
        held = Identity(*_parts(tmp_path / swarm.run / FOLDER / "bad.0.pem"))
        old_key, new_key_ = keys_of(swarm)
        ports, context = listening_ports(swarm.peers["a"]), client_context(held, tmp_path)

        def answers(key: bytes) -> bool:
            found = [ask_sidecar(port, context, swarm.run, "a", key) for port in ports]
            return any(answer.startswith(b"HTTP/1.1 200") for answer in found)

        swarm.wait(lambda: answers(new_key_), within_s=60, what="the sidecar, by the new key")
        assert not answers(old_key)
        assert new_key_ not in keys_learnt(swarm, held), "who is refused is told no key that opens anything"
        bad.send(signal.SIGCONT)
        assert swarm.finish("bad", within_s=60) == {"bad": 5}
        assert "it lies" in bad.output()
        again = swarm.trusted("bad", 8)
        assert swarm.finish("bad", within_s=60) == {"bad": 5}
        assert "evicted" in again.output()
        swarm.assert_one_history()


def keys_learnt(swarm: TrustedSwarm, shown: Identity) -> list[bytes]:
    """What the coordinator tells the evicted peer when it enrols anew with the token, or comes with what it has."""
    learnt: list[bytes] = []
    token = swarm.token_file.read_bytes().strip()
    badge = Badge(swarm.run, "bad", shown, None)
    with pytest.raises(Refused, match="was evicted"):
        enrol(
            swarm.address, run=swarm.run, peer="bad", token=token, fingerprint=swarm.authority.fingerprint, folder=None
        )  # fmt: skip
    member = Member(
        address=swarm.address, run=swarm.run, peer="bad", token=b"", on_abort=lambda op: None, secure=badge.secure
    )  # fmt: skip
    try:
        with contextlib.suppress(Refused, Unreachable):
            learnt.append(member.connect().session_key)
    finally:
        member.close()
    return learnt


def keys_of(swarm: TrustedSwarm) -> tuple[bytes, bytes]:
    """The session keys that the run began with and has now, as its journal has them."""
    from atoll.membership.journal import JournalFile
    from atoll.membership.steps import EvictionDecided, TermRaised

    copy = swarm.folder / "journal.copy"
    copy.write_bytes(swarm.journal.read_bytes())
    journal = JournalFile(copy, swarm.run)
    keys = [each.session_key for each in journal.records if isinstance(each, TermRaised | EvictionDecided)]
    journal.close()
    assert len(set(keys)) == 2, "the eviction came with another key"
    return keys[0], keys[-1]


def ask_sidecar(port: int, context: ssl.SSLContext, run: str, donor: str, key: bytes) -> bytes:
    """Two requests on one connection: the first hears what to prove, the second proves it."""
    heard = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        with context.wrap_socket(plain) as secure:
            secure.settimeout(5)
            secure.sendall(b"GET /v1/held/-1 HTTP/1.1\r\nHost: x\r\n\r\n")
            first = secure.recv(65536)
            line = next((each for each in first.split(b"\r\n") if each.lower().startswith(b"www-auth")), b"")
            nonce = proof.parse_challenge(line.partition(b":")[2].strip().decode())
            if nonce is None:
                return first
            asked = proof.Request(
                run=run, donor=donor, method="GET", target="/v1/held/-1", byte_range="",
                server_nonce=nonce, client_nonce=proof.new_nonce(), count=1,
            )  # fmt: skip
            words = f"GET /v1/held/-1 HTTP/1.1\r\nHost: x\r\nAuthorization: {asked.credentials(key)}\r\n\r\n"
            secure.sendall(words.encode())
            heard = secure.recv(65536)
    return heard


def _parts(file: Path) -> tuple[str, str, str]:
    certificate, authority, key = file.read_text().split("\f")
    return certificate, key, authority


def joins(swarm: Swarm, peer: str) -> list[dict[str, object]]:
    return [event for event in swarm.events("PeerJoined") if event["peer"] == peer]


def test_a_flood_from_one_source_keeps_nobody_out(tmp_path: Path) -> None:
    """Two hundred connections a second that prove nothing: the run goes on, a genuine newcomer gets in meanwhile,
    and the coordinator's memory stays where it was. `benchmarks/strangers.py` measures it."""
    with run_of_two(tmp_path) as swarm:
        coordinator = psutil.Process(swarm.coordinator.pid)
        before_bytes = coordinator.memory_info().rss
        begun_s, opened, hung_up = time.monotonic(), 0, 0
        ends_s = begun_s + 6
        newcomer: Peer | None = None
        while time.monotonic() < ends_s or not swarm.events("CaughtUp", "late"):
            assert time.monotonic() < ends_s + 60 + SLACK_S, swarm.logs()
            with contextlib.suppress(OSError):
                stranger = socket.create_connection(
                    ("127.0.0.1", port_of(swarm)), timeout=5, source_address=("127.0.0.7", 0)
                )
                opened += 1
                with stranger:
                    try:
                        stranger.sendall(secrets.token_bytes(200))
                        stranger.recv(100)
                    except ConnectionError:
                        hung_up += 1
            if newcomer is None and opened > 300:
                newcomer = swarm.trusted("late", 8, *FOREVER)
            time.sleep(0.005)
        assert opened > 300
        listened_to = BURST + PER_S * (time.monotonic() - begun_s)
        assert hung_up >= opened - 1.5 * listened_to, "what is above the limit is not listened to at all"
        assert coordinator.memory_info().rss - before_bytes < 64 << 20
        swarm.assert_one_history()
