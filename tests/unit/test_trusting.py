"""How a coordinator comes by its authority, where it may do without, and what it leaves when a start fails."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from atoll.cli.coordinator import _say_how_to_join
from atoll.cli.main import run
from atoll.cli.trusting import ADMIN_TOKEN, AUTHORITY, JOIN_TOKEN, Trusted, open_trust
from atoll.config.load import load
from atoll.errors import AtollError, ConfigError, LocalError, Refused, Unreachable
from atoll.membership.register import parse_token
from atoll.network.authority import Authority
from atoll.network.pinning import fetch_authority
from atoll.network.tls import server_context

WEEK_S = 7 * 86400.0


def opened(folder: Path, *sets: str, host: str = "0.0.0.0", new: bool = False) -> Trusted | None:
    config = load(None, ["run.name=bern", *sets], {})
    return open_trust(config, host, folder / AUTHORITY, new=new, join_for_s=WEEK_S)


def made(folder: Path) -> Trusted:
    trusted = opened(folder, new=True)
    assert trusted is not None
    trusted.keep()
    return trusted


def test_a_new_run_has_an_authority_and_two_tokens_that_only_their_owner_reads(tmp_path: Path) -> None:
    trusted = made(tmp_path)
    assert [each.scope for each in trusted.first_tokens] == ["admin", "join"]
    for name in (AUTHORITY, ADMIN_TOKEN, JOIN_TOKEN):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert Authority.from_pem((tmp_path / AUTHORITY).read_bytes()).fingerprint == trusted.fingerprint
    texts = [(tmp_path / name).read_bytes().strip() for name in (ADMIN_TOKEN, JOIN_TOKEN)]
    assert [parse_token(text).key for text in texts] == [each.key for each in trusted.first_tokens]
    shown = repr(trusted) + " ".join(trusted.lines)
    assert "PRIVATE" not in shown
    assert not any(text.decode() in shown for text in texts)


def test_a_start_that_failed_before_it_led_can_be_repeated_without_new(tmp_path: Path) -> None:
    """The port was in use: files were written, and the journal knows no token."""
    with closing(socket.create_server(("127.0.0.1", 0))) as busy:
        bind = f"127.0.0.1:{busy.getsockname()[1]}"
        assert run(["coordinator", "--run", "bern", "--bind", bind, "--out", str(tmp_path), "--new"]) == 3
    again = opened(tmp_path)
    assert again is not None
    texts = [(tmp_path / name).read_bytes().strip() for name in (ADMIN_TOKEN, JOIN_TOKEN)]
    assert [each.key for each in again.first_tokens] == [parse_token(text).key for text in texts]
    assert again.secrets == {}


def test_tls_makes_the_authority_once(tmp_path: Path) -> None:
    first = opened(tmp_path, "net.security=tls")
    assert first is not None
    first.keep()
    second = opened(tmp_path, "net.security=tls")
    assert second is not None
    assert (second.fingerprint, second.secrets) == (first.fingerprint, {})


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_needs_no_authority(tmp_path: Path, host: str) -> None:
    assert opened(tmp_path, host=host) is None
    assert opened(tmp_path, "net.security=off", host=host) is None


@pytest.mark.parametrize(
    ("sets", "host", "says"),
    [
        ([], "0.0.0.0", "nothing is encrypted, and this is not loopback; make one with --new"),
        (["net.security=off"], "192.0.2.1", "nothing is encrypted"),
        (["net.vpn=nothing0"], "0.0.0.0", "no interface of that name"),
        (["net.vpn=lo"], "0.0.0.0", "0.0.0.0 is not on lo"),
    ],
)
def test_elsewhere_it_needs_one_or_a_vpn(tmp_path: Path, sets: list[str], host: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        opened(tmp_path, *sets, host=host)


def test_mistakes_are_told_and_nothing_is_overwritten(tmp_path: Path) -> None:
    trusted = made(tmp_path)
    with pytest.raises(ConfigError, match="is there already; leave out --new"):
        opened(tmp_path, new=True)
    with pytest.raises(LocalError, match="cannot write"):
        trusted.keep()
    with pytest.raises(ConfigError, match=r"net\.security = off, and .* is there"):
        opened(tmp_path, "net.security=off")
    (tmp_path / AUTHORITY).chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        opened(tmp_path)
    (tmp_path / AUTHORITY).chmod(0o600)
    (tmp_path / AUTHORITY).write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="put back the file that --new made"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("host", "advertise", "address"),
    [
        ("127.0.0.1", "", "127.0.0.1:7070"),
        ("::1", "", "[::1]:7070"),
        ("0.0.0.0", "box.example", "box.example:7070"),
        ("0.0.0.0", "box.example:81, 2001:db8::1", "box.example:81,[2001:db8::1]:7070"),
    ],
)
def test_the_join_line_has_an_address(tmp_path: Path, host: str, advertise: str, address: str) -> None:
    out = io.StringIO()
    trusted = made(tmp_path)
    config = load(None, ["run.name=bern"], {})
    _say_how_to_join(Console(file=out), config, host, 7070, advertise, shared=False, trusted=trusted)
    line = f"join: atoll join {address} --run bern --authority {trusted.fingerprint}\n"
    assert line in out.getvalue()


def test_where_it_listens_everywhere_the_line_has_an_address_too(tmp_path: Path) -> None:
    out = io.StringIO()
    config = load(None, ["run.name=bern"], {})
    _say_how_to_join(Console(file=out), config, "0.0.0.0", 7070, "", shared=False, trusted=made(tmp_path))
    (line,) = (each for each in out.getvalue().splitlines() if each.startswith("join:"))
    assert "HOST" not in line
    assert "0.0.0.0" not in line


class Door:
    """Shows an authority to whoever asks, as a coordinator does."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._context = server_context(authority.coordinator_identity(), strangers=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.place = self._listener.getsockname()[:2]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        try:
            while True:
                plain, _ = self._listener.accept()
                try:
                    with self._context.wrap_socket(plain, server_side=True) as client:
                        client.recv(4096)
                        body = self._authority.certificate.encode()
                        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                except OSError:
                    continue
        except OSError:
            return

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """Takes connections, and says nothing."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield listener.getsockname()[:2]


def test_a_coordinator_that_is_silent_leaves_time_for_the_others(silent: tuple[str, int]) -> None:
    authority = Authority.new("bern")
    with closing(Door(authority)) as door:
        found = fetch_authority([silent, door.place], authority.fingerprint, connect_s=2.0)
    assert found == authority.certificate


def test_one_that_is_another_runs_does_not_hide_the_right_one() -> None:
    authority, other = Authority.new("bern"), Authority.new("bern")
    with closing(Door(other)) as wrong, closing(Door(authority)) as right:
        places = [wrong.place, right.place]
        assert fetch_authority(places, authority.fingerprint, connect_s=5.0) == authority.certificate
        with pytest.raises(Refused, match="is not this run's coordinator"):
            fetch_authority([wrong.place], authority.fingerprint, connect_s=5.0)


def test_nobody_there_is_one_line(silent: tuple[str, int]) -> None:
    with pytest.raises(Unreachable, match="no answer") as found:
        fetch_authority([silent], Authority.new("bern").fingerprint, connect_s=0.3)
    assert isinstance(found.value, AtollError)
    assert "\n" not in str(found.value)
