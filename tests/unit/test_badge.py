"""A peer's certificate: kept in a file, renewed while it is a member, used again without a token."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from atoll.diloco.badge import FOLDER, enrol, way_in
from atoll.errors import ConfigError, LocalError, Refused, Unreachable
from atoll.events import PeerCertified
from atoll.membership.client import Member
from atoll.membership.register import Register
from atoll.membership.registrar import Trust
from atoll.network.authority import Authority
from atoll.network.tls import server_context
from support.fake_peer import CoordinatorThread

AUTHORITY = Authority.new("run")
MADE, TOKEN = Register().make_token("join")


def coordinator(folder: Path) -> CoordinatorThread:
    context = server_context(AUTHORITY.coordinator_identity(), strangers=True)
    trust = Trust(context=context, authority=AUTHORITY.certificate, certify=AUTHORITY.certify_peer)
    return CoordinatorThread(folder / "journal", trust=trust, first_tokens=[MADE])


@pytest.fixture
def running(tmp_path: Path) -> Iterator[CoordinatorThread]:
    with coordinator(tmp_path) as up:
        yield up


def certified(running: CoordinatorThread) -> list[PeerCertified]:
    return [event for event in running.events if isinstance(event, PeerCertified)]


def enrolled(running: CoordinatorThread, folder: Path | None, token: str = TOKEN, **more: object):
    about = {"run": "run", "peer": "bern", "fingerprint": AUTHORITY.fingerprint, "folder": folder, **more}
    return enrol(running.address, token=token.encode(), **about)  # type: ignore[arg-type]


def test_a_member_renews_its_certificate_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is connected for several times as long as a certificate counts, and comes back after a break with the last."""
    monkeypatch.setattr("atoll.membership.register.CERTIFICATE_S", 3.0)
    with coordinator(tmp_path) as running:
        badge = enrolled(running, tmp_path)
        member = Member(
            address=running.address,
            run="run",
            peer="bern",
            token=b"",
            on_abort=lambda op: None,
            secure=badge.secure,
            renew=badge.renew,
        )
        with closing(member):
            member.connect()
            deadline_s = time.monotonic() + 60
            while len(certified(running)) < 6:
                assert time.monotonic() < deadline_s, running.events
                member.check()
                time.sleep(0.05)
            serials = [event.serial for event in certified(running)]
            assert len(set(serials)) == len(serials)
            assert [event.renewed for event in certified(running)] == [False] + [True] * (len(serials) - 1)
            assert badge.file is not None
            again = enrolled(running, tmp_path, token="")  # the file holds the newest
            assert again.identity.certificate != badge.identity.certificate


def test_the_key_is_kept_to_its_owner(running: CoordinatorThread, tmp_path: Path) -> None:
    badge = enrolled(running, tmp_path, peer="a/../b")
    assert badge.file == tmp_path / FOLDER / "a%2F..%2Fb.0.pem"
    assert badge.file.stat().st_mode & 0o777 == 0o600
    assert badge.file.parent.stat().st_mode & 0o777 == 0o700
    assert "PRIVATE" not in repr(badge)
    assert os.listdir(badge.file.parent) == [badge.file.name]


def test_without_a_folder_nothing_is_kept(running: CoordinatorThread, tmp_path: Path) -> None:
    assert enrolled(running, None).file is None
    with pytest.raises(Refused, match="no token, and no certificate"):
        enrolled(running, None, token="")


@pytest.mark.parametrize("damage", ["", "nonsense", "half"])
def test_a_damaged_file_is_made_anew_by_the_token(
    running: CoordinatorThread, tmp_path: Path, damage: str
) -> None:
    file = enrolled(running, tmp_path).file
    assert file is not None
    text = file.read_text()
    file.write_text(text[: len(text) // 2] if damage == "half" else damage)
    enrolled(running, tmp_path)
    assert [event.renewed for event in certified(running)] == [False, False]


def test_a_certificate_of_another_authority_is_not_shown(running: CoordinatorThread, tmp_path: Path) -> None:
    other = Authority.new("run")
    file = enrolled(running, tmp_path).file
    assert file is not None
    certificate, _, key = file.read_text().split("\f")
    file.write_text("\f".join((certificate, other.certificate, key)))
    enrolled(running, tmp_path)
    assert not certified(running)[-1].renewed


def test_what_an_earlier_start_left_opens_the_way_in(running: CoordinatorThread, tmp_path: Path) -> None:
    enrolled(running, tmp_path)
    about = {"peer": "bern", "fingerprint": AUTHORITY.fingerprint, "folder": tmp_path}
    token, secure = way_in(running.address, token=b"", **about)  # type: ignore[arg-type]
    assert token == b""
    assert secure is not None
    assert secure.key
    token, secure = way_in(running.address, token=TOKEN.encode(), **about)  # type: ignore[arg-type]
    assert (token, secure is not None and secure.key) == (TOKEN.encode(), b"")


def test_a_full_disk_is_one_line(running: CoordinatorThread, tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file in the folder's place")
    with pytest.raises(LocalError, match="cannot keep this peer's key"):
        enrolled(running, tmp_path)


def test_mistakes_are_one_line(running: CoordinatorThread, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fingerprint has 6 digits"):
        enrolled(running, tmp_path, fingerprint="sha256:abcdef")
    with pytest.raises(Refused, match="this coordinator runs 'run', not 'walk'"):
        enrolled(running, tmp_path, run="walk")
    with pytest.raises(Refused, match="printable"):
        enrolled(running, None, peer="a\nb")
    with (
        CoordinatorThread(tmp_path / "plain") as plain,
        pytest.raises(Unreachable, match="does not speak TLS"),
    ):
        enrolled(plain, tmp_path, peer="x")
