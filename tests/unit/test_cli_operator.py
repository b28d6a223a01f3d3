"""`atoll status`, `stop`, `leave` and `evict`: one line or one JSON object, and the documented exit codes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.cli import status as status_command
from atoll.cli.evict import parse_duration
from atoll.cli.main import run
from atoll.errors import ConfigError
from atoll.membership.operator import Status
from support.fake_peer import TOKEN, CoordinatorThread, FakePeer, new_member


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN.decode())
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorThread]:
    with CoordinatorThread(tmp_path / "journal", start_peers=1) as running:
        yield running


@pytest.fixture
def member(coordinator: CoordinatorThread) -> Iterator[FakePeer]:
    fake = FakePeer(new_member(coordinator.address, "bern"), "bern")
    fake.join()
    yield fake
    fake.member.close()


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(arguments)
    told = capsys.readouterr()
    return code, told.out, told.err


def test_status_is_a_table(
    coordinator: CoordinatorThread, member: FakePeer, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = said(capsys, "status", coordinator.address)
    assert (code, err) == (0, "")
    assert "run run" in out
    assert any(line.startswith("bern") and "training" in line for line in out.splitlines())


def test_status_json_is_one_object_and_nothing_else(
    coordinator: CoordinatorThread, member: FakePeer, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = said(capsys, "status", coordinator.address, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert tuple(found) == Status.__struct_fields__
    assert found["peers"][0]["peer"] == "bern"


def test_status_watches_until_the_run_is_over(
    coordinator: CoordinatorThread,
    member: FakePeer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leave_on_the_third(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            member.member.leave("all is done", done=True)
            coordinator.wait()

    pauses: list[float] = []
    monkeypatch.setattr(status_command.time, "sleep", leave_on_the_third)
    code, out, err = said(capsys, "status", coordinator.address, "--json", "--watch", "0.5")
    assert pauses == [0.5] * 3
    assert [json.loads(line)["run"] for line in out.splitlines()] == ["run"] * 3
    assert code == 4
    assert "whether the run is over already" in err


def test_each_order_says_in_one_line_what_happened(
    coordinator: CoordinatorThread, member: FakePeer, capsys: pytest.CaptureFixture[str]
) -> None:
    address = coordinator.address
    assert said(capsys, "leave", address, "bern", "--reason", "needed") == (
        0,
        "bern is asked to leave; it goes at its next safe point\n",
        "",
    )
    assert said(capsys, "evict", address, "bern", "--for", "10m") == (
        0,
        "bern is evicted, and its id is refused for 600 s\n",
        "",
    )
    assert said(capsys, "stop", address, "--reason", "enough") == (
        0,
        "the run had no member left; it is over at version 0\n",
        "",
    )
    assert coordinator.wait() == (0, "the run was stopped by an operator: enough")


@pytest.mark.parametrize("order", ["leave", "evict"])
def test_an_order_about_nobody_is_a_mistake(
    order: str, coordinator: CoordinatorThread, member: FakePeer, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = said(capsys, order, coordinator.address, "brn")
    assert (code, out) == (2, "")
    assert err == "atoll: error: this run has no peer 'brn'; its peers are: bern\n"


COMMANDS = (["status"], ["status", "--json"], ["stop"], ["leave", "bern"], ["evict", "bern"])


def placed(command: list[str], address: str) -> list[str]:
    return [command[0], address, *command[1:]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_nobody_there_is_one_line_and_exit_4(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    code, out, err = said(capsys, *placed(command, address))
    assert (code, out) == (4, "")
    (line,) = err.splitlines()
    assert line.startswith(f"atoll: error: no coordinator at {address} (connection refused); check")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_another_token_is_one_line_and_exit_5(
    command: list[str],
    coordinator: CoordinatorThread,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATOLL_TOKEN", "x" * 32)
    code, out, err = said(capsys, *placed(command, coordinator.address))
    assert (code, out) == (5, "")
    (line,) = [line for line in err.splitlines() if line.startswith("atoll: ")]  # not the coordinator's log
    assert line.startswith("atoll: error: the run token does not fit")
    monkeypatch.delenv("ATOLL_TOKEN")
    code, out, err = said(capsys, *placed(command, coordinator.address))
    assert (code, out) == (5, "")
    assert "no run token: set ATOLL_TOKEN" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["status"], "requires an argument"),
        (["status", "nowhere"], "is no coordinator address; write it as host:port"),
        (["status", "127.0.0.1:1", "--watch", "-1"], "give a number of seconds above 0"),
        (["leave", "127.0.0.1:1"], "requires an argument"),
        (["evict", "127.0.0.1:1", "bern", "--for", "soon"], "write a time above 0 as 90s, 10m, 2h or 1d"),
        (["evict", "127.0.0.1:1", "bern", "--for", "0"], "write a time above 0"),
    ],
)
def test_a_mistake_is_exit_2(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) == 1


def test_durations() -> None:
    assert [parse_duration(text) for text in ("90s", "10m", "1.5h", "2d", "7")] == [90, 600, 5400, 172800, 7]
    for wrong in ("", "-1", "10x", "m", "1 0", "nan", "inf"):
        with pytest.raises(ConfigError, match="write a time above 0"):
            parse_duration(wrong)


@pytest.mark.parametrize(
    "words",
    [["status"], ["stop"], ["leave", "bern"], ["evict", "bern"], ["token", "create"], ["token", "list"]],
)
def test_the_dht_is_not_asked_and_that_is_one_sentence(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = words[: 2 if words[0] == "token" else 1]
    code, out, err = said(capsys, *command, "dht:east:7071", *words[len(command) :])
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert "dht:east:7071: this command does not ask the DHT; give it the coordinator's own host:port" in line
