"""What is said to `ip`, `wg` and `wireguard-go`, which are scripts here: no secret in an argument, no foreign interface
touched, one line for what is missing. With the real ones: tests/wan/test_vpn_wan.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.errors import AtollError, ConfigError, LocalError
from atoll.network import wireguard
from atoll.network.wireguard import Change, Interface, check_able, free_port
from atoll.network.wireguard_keys import new_key_pair, text_of

KEYS, OTHER = new_key_pair(), new_key_pair()

# Each call and what came on stdin is one line of the log. `ip` shows an interface that was added, with its alias.
_IP = """#!/bin/sh
echo "ip $*" >> "$LOG"
case "$*" in
  "-json link show dev "*)
    [ -e "$STATE/there" ] || exit 1
    printf '[{"ifname":"x"%s}]' "$(cat "$STATE/there")";;
  "link add dev "*" type wireguard")
    [ -n "$KERNEL" ] || { echo "Error: Unknown device type." >&2; exit 2; }
    : > "$STATE/there";;
  "link set dev "*" alias "*) shift 5; printf ',"ifalias":"%s"' "$*" > "$STATE/there";;
  "link del dev "*) rm "$STATE/there"; rm -f "$STATE"/sockets/*;;
esac
"""
_WG = """#!/bin/sh
echo "wg $* < $(cat)" >> "$LOG"
"""
_WIREGUARD_GO = """#!/bin/sh
echo "wireguard-go $*" >> "$LOG"
: > "$STATE/there"
mkdir -p "$STATE/sockets"
: > "$STATE/sockets/$1.sock"
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("ip", _IP), ("wg", _WG)):
        put(folder, name, text)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(wireguard, "SOCKETS", tmp_path / "sockets")
    monkeypatch.setattr(Interface, "_allow_ipv6", lambda self: None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return tmp_path


def put(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def interface(tools: Path, kernel: str = "") -> Interface:
    path = f"{tools / 'bin'}:/usr/bin:/bin"
    return Interface(
        "atoll0", {"PATH": path, "LOG": str(tools / "log"), "STATE": str(tools), "KERNEL": kernel}
    )


def said(tools: Path) -> str:
    return (tools / "log").read_text()


def test_the_kernel_s_is_taken_where_there_is_one(tools: Path) -> None:
    put(tools / "bin", "wireguard-go", _WIREGUARD_GO)
    ours = interface(tools, kernel="yes")
    assert ours.make("my run", KEYS, 51820, "fd00::1") == "kernel"
    assert "wireguard-go" not in said(tools)
    assert ours.owner() == "my run"


def test_else_wireguard_go_and_both_end_with_the_interface(tools: Path) -> None:
    put(tools / "bin", "wireguard-go", _WIREGUARD_GO)
    ours = interface(tools)
    assert ours.make("my run", KEYS, 51820, "fd00::1") == "wireguard-go"
    assert ours.owner() == "my run"
    assert ours.remove()
    assert not ours.remove()
    assert ours.owner() is None


def test_the_private_key_is_in_no_argument(tools: Path) -> None:
    ours = interface(tools, kernel="yes")
    ours.make("run", KEYS, 51820, "fd00::1")
    ours.set([Change(OTHER.public, "fd00::2", ("192.0.2.1", 5))])
    lines = [line.partition(" < ") for line in said(tools).splitlines()]
    secret = text_of(KEYS.private)
    assert [stdin for _, _, stdin in lines if secret in stdin] == [secret], "over a pipe, once"
    assert not [words for words, _, _ in lines if secret in words]


def test_all_changes_are_one_call(tools: Path) -> None:
    ours = interface(tools)
    a, b, c = (new_key_pair().public for _ in range(3))
    ours.set([])
    ours.set(
        [
            Change(a, "fd00::a", ("2001:db8::1", 5), afresh=True),
            Change(b, "fd00::b"),
            Change(c, gone=True),
        ]
    )
    peer = f"peer {text_of(a)} remove peer {text_of(a)} persistent-keepalive 25 allowed-ips fd00::a/128"
    assert said(tools) == (
        f"wg set atoll0 {peer} endpoint [2001:db8::1]:5 "
        f"peer {text_of(b)} persistent-keepalive 25 allowed-ips fd00::b/128 peer {text_of(c)} remove < \n"
    )


@pytest.mark.parametrize("alias", ["", ',"ifalias":"my tunnel"'])
def test_somebody_else_s_interface_is_left_alone(tools: Path, alias: str) -> None:
    (tools / "there").write_text(alias)
    ours = interface(tools, kernel="yes")
    with pytest.raises(
        LocalError, match="the interface atoll0 exists and is not Atoll's: choose another name"
    ):
        ours.make("run", KEYS, 51820, "fd00::1")
    assert not ours.remove()
    assert set(said(tools).splitlines()) == {"ip -json link show dev atoll0"}


def test_one_of_ours_that_is_left_over_is_made_anew(tools: Path) -> None:
    (tools / "there").write_text(',"ifalias":"atoll vpn: yesterday"')
    ours = interface(tools, kernel="yes")
    assert ours.make("today", KEYS, 51820, "fd00::1") == "kernel"
    assert "ip link del dev atoll0" in said(tools)
    assert ours.owner() == "today"


def test_a_failure_on_the_way_leaves_nothing(tools: Path) -> None:
    put(tools / "bin", "wg", "#!/bin/sh\necho 'Unable to modify interface: no' >&2\nexit 1\n")
    ours = interface(tools, kernel="yes")
    with pytest.raises(
        LocalError, match=r"wg set atoll0 private-key /dev/stdin: Unable to modify interface: no"
    ):
        ours.make("run", KEYS, 51820, "fd00::1")
    assert ours.owner() is None


def test_no_wireguard_at_all_is_one_line_with_the_packages(tools: Path) -> None:
    with pytest.raises(LocalError) as caught:
        interface(tools).make("run", KEYS, 51820, "fd00::1")
    (line,) = str(caught.value).splitlines()
    assert "Unknown device type" in line
    assert "there is no wireguard-go" in line
    assert "apt-get install wireguard-tools iproute2, and wireguard-go" in line


def test_a_wireguard_go_that_makes_nothing_is_given_up(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wireguard, "_START_S", 0.2)
    put(tools / "bin", "wireguard-go", "#!/bin/sh\n")
    with pytest.raises(LocalError, match=r"made no interface atoll0 in 0\.2 s; is there /dev/net/tun\?"):
        interface(tools).make("run", KEYS, 51820, "fd00::1")


def test_what_it_needs_is_said_first(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_able("atoll0")
    (tools / "bin" / "wg").unlink()
    assert refusal("atoll0") == (
        "no wg here; on Debian and Ubuntu: apt-get install wireguard-tools iproute2, and wireguard-go where the "
        "kernel has none"
    )
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "which only root may: sudo -E atoll vpn" in refusal("atoll0")


@pytest.mark.parametrize("name", ["", "0atoll", "a/b", "-a", "atoll0123456789a", "a b"])
def test_a_name_that_no_interface_can_have_is_a_mistake(tools: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--interface"):
        check_able(name)


def refusal(name: str) -> str:
    with pytest.raises(AtollError) as caught:
        check_able(name)
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_a_port_that_is_taken_is_said() -> None:
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as held:
        held.bind(("0.0.0.0", 0))
        port = held.getsockname()[1]
        with pytest.raises(LocalError, match=f"UDP port {port}: address already in use; stop what has it"):
            free_port(port)
    assert free_port(port) == port
    assert free_port(0) > 0
