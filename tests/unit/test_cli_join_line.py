"""The join line as a peer prints it: once it is connected, ready to paste."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from atoll.cli.join_line import JoinLinePrinter
from atoll.events import PeerKilled, RunStarted


@pytest.mark.parametrize(
    "address", ["10.0.0.5:7070", "[::1]:7070", "127.0.0.1:7070", "east.example:1,west.example:2"]
)
def test_a_peer_prints_the_line_that_led_it_here(address: str) -> None:
    out = io.StringIO()
    printer = JoinLinePrinter(Console(file=out, width=20), address)
    printer(0.0, "a", PeerKilled(peer="b", signal="SIGKILL"))
    assert out.getvalue() == ""
    printer(0.0, "a", RunStarted(role="peer", run="my-run", settings_digest="", pid=1))
    line, token, more = out.getvalue().splitlines()
    assert line == f"join: atoll join {address} --run my-run", "on one line, however narrow the terminal"
    assert "ATOLL_TOKEN" in token
    here = address.startswith(("127.", "[::1]"))
    assert ("on this machine" in more) == here
    assert ("NOTHING IS ENCRYPTED" in more) == (not here)


def test_of_a_run_with_an_authority_the_line_holds_its_fingerprint() -> None:
    out = io.StringIO()
    printer = JoinLinePrinter(Console(file=out, width=20), "10.0.0.5:7070", "sha256:ab")
    printer(0.0, "a", RunStarted(role="peer", run="my-run", settings_digest="", pid=1))
    line, _ = out.getvalue().splitlines()
    assert line == "join: atoll join 10.0.0.5:7070 --run my-run --authority sha256:ab"
