"""`atoll vpn`: who keeps an interface, what is shown of it, and mistakes in one line. Nothing here needs root."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from atoll.cli.main import VPN_COMMANDS, run
from atoll.cli.vpn import records
from atoll.cli.vpn.wishes import Credentials, Wishes, is_up, own_endpoints, parse_endpoint
from atoll.errors import ConfigError, LocalError
from atoll.membership.link import Secure
from atoll.network import own_addresses

PEER = {
    "peer": "bern",
    "address": "fd00::2",
    "path": "through hub",
    "endpoint": "192.0.2.1:51821",
    "rtt_s": 0.021,
    "handshake_age_s": 12.0,
    "received_bytes": 2_500_000,
    "sent_bytes": 1_000_000,
    "direct_bytes_per_s": None,
    "vpn_bytes_per_s": 10e6,
    "use": "vpn",
    "why": "the direct path is not reached",
    "measured_ago_s": 3.0,
    "addresses": ["fd00::2", ""],
}
STATUS = {
    "kind": "kernel",
    "run": "r",
    "peer": "a",
    "address": "fd00::1",
    "hub": "hub",
    "trouble": "",
    "peers": [PEER],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(records, "FOLDER", tmp_path / "run")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("ATOLL_TOKEN", raising=False)
    monkeypatch.delenv("ATOLL_TOKEN_FILE", raising=False)
    return tmp_path / "run"


@pytest.mark.parametrize("command", VPN_COMMANDS)
def test_every_command_has_a_help_worth_reading(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["vpn", command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: atoll vpn {command}")
    assert f"atoll vpn {command} " in text.split("\n", 1)[1]


def test_one_process_keeps_an_interface() -> None:
    assert records.keeper("atoll0") == 0
    with records.keeping("atoll0"):
        assert records.keeper("atoll0") == os.getpid()
        assert records.keeper("atoll1") == 0
        records.write_status("atoll0", STATUS)
        with pytest.raises(
            LocalError, match=rf"\(pid {os.getpid()}\) keeps atoll0: end it with atoll vpn down"
        ):
            with records.keeping("atoll0"):
                pass
        with records.keeping("atoll1"):
            pass
    assert (records.keeper("atoll0"), records.read_status("atoll0")) == (0, None)


HOLD = """
import pathlib, sys, time
from atoll.cli.vpn import records
records.FOLDER = pathlib.Path(sys.argv[1])
with records.keeping("atoll0"):
    print("kept", flush=True)
    time.sleep(60)
"""


def test_the_keeper_is_asked_to_end_and_waited_for(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"kept\n"
        assert records.keeper("atoll0") == process.pid
        assert records.end_keeper("atoll0", 20) == process.pid
        assert process.wait(timeout=10) == -signal.SIGTERM
    assert records.end_keeper("atoll0", 1) == 0


def test_a_keeper_that_was_killed_keeps_nothing(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        process.kill()
        process.wait(timeout=10)
    assert records.keeper("atoll0") == 0, "whatever its file says, and whoever has its pid by now"


def test_the_status_is_for_people_and_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    with records.keeping("atoll0"):
        records.write_status("atoll0", STATUS)
        assert run(["vpn", "status"]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "atoll0 (kernel): a of r is fd00::1; the hub is hub",
            "bern: through hub at 192.0.2.1:51821, 21 ms, handshake 12 s ago, in 2.5 MB, out 1.0 MB",
            "    fd00::2; direct -, VPN 80 Mbit/s: use vpn (the direct path is not reached)",
        ]
        assert run(["vpn", "status", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {**STATUS, "pid": os.getpid()}


def test_no_vpn_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["vpn", "status", "--interface", "atoll7"]) == 2
    assert "no atoll vpn is up on atoll7; start one with: sudo -E atoll vpn up" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["up", "127.0.0.1:1", "--run", "r"], ["down"]])
def test_without_root_nothing_is_tried(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    begun_s = time.monotonic()
    assert run(["vpn", *words]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "only root may: sudo -E atoll vpn" in line
    assert time.monotonic() - begun_s < 10
    assert not folder.exists()


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("203.0.113.7:51820", "203.0.113.7:51820"),
        ("[2001:db8::7]:9", "[2001:db8::7]:9"),
        ("2001:db8::7:9", "[2001:db8::7]:9"),
        ("localhost:9", None),
    ],
)
def test_endpoints_as_people_write_them(text: str, written: str | None) -> None:
    assert parse_endpoint(text) in ({written} if written else {"127.0.0.1:9", "[::1]:9"})


@pytest.mark.parametrize(
    "text", ["203.0.113.7", "203.0.113.7:x", ":51820", "203.0.113.7:0", "203.0.113.7:70000"]
)
def test_other_endpoints_are_a_mistake(text: str) -> None:
    with pytest.raises(ConfigError, match="write it as host:port"):
        parse_endpoint(text)


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".example"])
def test_an_endpoint_that_is_no_host_name_is_one_line(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--endpoint {host}:5: '{host}' is no host name$"):
        parse_endpoint(f"{host}:5")


def test_a_name_server_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(own_addresses, "LOOK_UP_S", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(30) and [])
    try:
        with pytest.raises(
            ConfigError, match=r"^--endpoint far\.example:5: no name server has answered within"
        ):
            parse_endpoint("far.example:5")
    finally:
        over.set()


def test_the_line_of_an_interface_that_is_up_gives_the_peer_the_same_name() -> None:
    wishes = Wishes(
        run="r",
        peer="my box",
        coordinators=("127.0.0.1:1",),
        port=51820,
        relay_port=51821,
        endpoints=(),
        stated=0,
        hub=False,
    )
    line = is_up("atoll0", "kernel", wishes, "fd00::1")
    assert line.startswith("atoll0 is up (kernel): my box of r is fd00::1, UDP port 51820; join with ")
    assert shlex.split(line)[-4:] == ["--set", "local.bind=atoll0", "--set", "local.peer=my box"]


def test_a_machine_names_what_others_may_reach() -> None:
    known = ["127.0.0.1", "192.168.1.5", "::1", "fe80::1%eth0", "2001:db8::5", "10.0.0.9"]
    assert own_endpoints(["10.0.0.9"], known, 7) == ("10.0.0.9:7", "192.168.1.5:7", "[2001:db8::5]:7")


def test_a_certificate_is_renewed_when_it_is_due() -> None:
    context = ssl.create_default_context()
    first, second = (Secure(context=context, server_name=name) for name in ("first", "second"))

    async def renew(address: str, secure: Secure) -> tuple[Secure, float]:
        renewed.append(secure.server_name)
        return second, 1000.0

    renewed: list[str] = []
    credentials = Credentials(b"", first, renew)
    asyncio.run(credentials.renew_in_time("a:1"))
    assert renewed == []
    credentials.due_s = 0.0
    asyncio.run(credentials.renew_in_time("a:1"))
    asyncio.run(credentials.renew_in_time("a:1"))
    assert (renewed, credentials.secure) == (["first"], second)
