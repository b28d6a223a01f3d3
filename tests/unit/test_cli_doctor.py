"""`atoll doctor`: what it says, and the exit code for each kind of problem."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.checks import examined
from atoll.cli.checks.join_line import JoinLine, read_join_line
from atoll.cli.checks.run import span
from atoll.cli.doctor import EXIT_CODES, exit_code
from atoll.cli.main import run
from atoll.comm.native import NativeCommunicator
from atoll.errors import ConfigError
from atoll.membership import service
from atoll.membership.client import Member
from atoll.membership.examining import ExaminationDoor
from atoll.network.checks.finding import Finding
from atoll.values import Range, RankInfo
from support.fake_peer import TOKEN, CoordinatorThread, FakePeer, new_member
from support.ipv6 import has_ipv6
from support.slack import SLACK_S

FINGERPRINT = "sha256:" + "ab" * 32


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN.decode())
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorThread]:
    with CoordinatorThread(tmp_path / "journal", start_peers=1) as running:
        yield running


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the one object."""
    code = run(["doctor", *arguments, "--json"])
    told = capsys.readouterr()
    # The coordinator of these tests is in this process, and may log whom it turned away.
    assert [line for line in told.err.splitlines() if "atoll.membership" not in line] == []
    assert told.out.count("\n") == 1
    found = json.loads(told.out)
    assert found["exit_code"] == code
    return code, found


def named(told: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [each for each in told["findings"] if each["name"] == name]


def problems(told: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each["name"], each["about"]) for each in told["findings"] if each["grade"] == "problem"]


class RealMember(FakePeer):
    """A member with a real engine, or with an address where nobody listens."""

    def __init__(self, member: Member, peer: str, host: str = "127.0.0.1") -> None:
        super().__init__(member, peer)
        self.host = host
        self.engine: NativeCommunicator | None = None

    def join_with_engine(self) -> None:
        key = self.member.connect().session_key
        self.engine = NativeCommunicator(
            run="run", peer=self.peer, rank=0, session_key=key, bind_host="127.0.0.1", num_workers=1
        )
        declaration = self.declaration()
        ranks = (RankInfo(self.host, self.engine.port, (Range(0, 6),)),)
        self.member.declare(type(declaration)(**{**_fields(declaration), "ranks": ranks}))

    def close(self) -> None:
        self.member.close()
        if self.engine is not None:
            self.engine.close()


def _fields(struct: Any) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


# ---- without a run ---------------------------------------------------------------------------------------------------


def test_alone_it_looks_at_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, told = asked(capsys)
    names = {each["name"] for each in told["findings"]}
    assert {"versions", "compiler", "gpu", "memory", "/dev/shm", "disk", "open files"} <= names
    assert {"tcp buffers", "congestion", "after a pause", "mtu", "ipv6", "host name"} <= names
    assert code in (0, 3)
    assert (told["run"], told["members"]) == (None, [])


def test_the_screen_is_short_and_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["doctor", "--set", "local.device=cuda:7"])
    out = capsys.readouterr().out
    assert code == 3
    lines = out.splitlines()
    assert lines[0].startswith("atoll doctor: ")
    assert any("✗ gpu" in line and "local.device = cuda:7" in line for line in lines)
    assert lines.index("to be done") > lines.index("its network")
    assert lines[-1] == "not fit yet (exit 3)"


# ---- the join line ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["10.0.0.5", "--run", "r"], "address '10.0.0.5' has no port: write it as 10.0.0.5:7070"),
        (["[::1]", "--run", "r"], "address '[::1]' has no port"),
        (["[::1:7070", "--run", "r"], "has no closing bracket"),
        ([":7070", "--run", "r"], "has no host before the port"),
        (["host:70700", "--run", "r"], "port '70700' (of 'host:70700') is none"),
        (["host:7070,", "--run", "r"], "is empty between two commas"),
        (["host:7070"], "has no run: atoll doctor host:7070 --run NAME"),
        (["--run", "r"], "has no address"),
        (["host:7070", "--run", "r", "--authority", "sha256:12"], "fingerprint has 2 digits"),
        (["join: atoll join host:7070 --run"], "ends after --run: copy it whole"),
        (["atoll join --run r"], "needs one address"),
        (["atoll join host:7070 --run r --fast"], "holds --fast"),
        (["atoll join host:7070 --run 'r"], "cannot be read (no closing quotation)"),
    ],
)
def test_a_broken_join_line_names_its_part(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert run(["doctor", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 1
    assert says in told.err


def test_a_join_line_is_read_in_parts_or_whole() -> None:
    assert read_join_line(None, None, "") is None
    expected = JoinLine("a:1,[::1]:2", "my run", FINGERPRINT)
    assert read_join_line("a:1,[::1]:2", "my run", FINGERPRINT.upper()) == expected
    dht = read_join_line("dht:a:1,b:2", "r", FINGERPRINT)
    assert dht == JoinLine("dht:a:1,b:2", "r", FINGERPRINT)
    whole = f"join: atoll join a:1,[::1]:2 --run 'my run' --authority={FINGERPRINT}"
    assert read_join_line(whole, None, "") == expected
    with pytest.raises(ConfigError, match="ends after --authority"):
        read_join_line("a:1 --run r --authority", None, "")


# ---- with a coordinator ----------------------------------------------------------------------------------------------


def test_a_run_without_members(coordinator: CoordinatorThread, capsys: pytest.CaptureFixture[str]) -> None:
    _, told = asked(capsys, coordinator.address, "--run", "run")
    assert not [each for each in problems(told) if each[1] != "machine"]
    (nat,) = named(told, "nat")
    assert nat["details"]["kind"] == "none"
    (inward,) = named(told, "ports in")
    assert inward["grade"] == "ok"
    (clock,) = named(told, "clock")
    assert abs(clock["details"]["ahead_s"]) < 2
    (pace,) = named(told, "a round")
    assert "not known before a first member" in pace["sentence"]


def test_ways_to_members_are_measured(
    coordinator: CoordinatorThread, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(RealMember(new_member(coordinator.address, "bern"), "bern")) as member:
        member.join_with_engine()
        _, told = asked(capsys, coordinator.address, "--run", "run")
        (way,) = told["members"]
        assert (way["peer"], way["why_not"], way["tried"]) == ("bern", "", True)
        assert way["bytes_per_s"] > 0
        (outward,) = named(told, "ports out")
        assert outward["sentence"] == "1 of 1 member reached"
        (pace,) = named(told, "a round")
        assert pace["details"]["sync_s"] > 0
        assert "with this machine" in pace["sentence"]
        _, quick = asked(capsys, coordinator.address, "--run", "run", "--no-rates")
        assert [each["tried"] for each in quick["members"]] == [False]


def test_a_member_that_cannot_be_reached_is_named(
    coordinator: CoordinatorThread, capsys: pytest.CaptureFixture[str]
) -> None:
    """It announces port 1, where nobody listens."""
    with contextlib.closing(RealMember(new_member(coordinator.address, "bern"), "bern")) as member:
        member.join()
        code, told = asked(capsys, coordinator.address, "--run", "run")
        assert ("ports out", "out") in problems(told)
        (outward,) = named(told, "ports out")
        assert "no way from here to bern at 127.0.0.1:" in outward["sentence"]
        assert "on bern's machine open TCP port" in outward["remedy"]
        assert code in (3, 11)
        assert code == 11 or ("versions", "machine") not in problems(told)


def test_a_clock_ten_minutes_off_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ahead = partial(ExaminationDoor, wall_time_s=lambda: time.time() + 600)
    monkeypatch.setattr(service, "ExaminationDoor", ahead)
    with CoordinatorThread(tmp_path / "other") as coordinator:
        _, told = asked(capsys, coordinator.address, "--run", "run")
    assert ("clock", "clock") in problems(told)
    (clock,) = named(told, "clock")
    assert clock["sentence"].startswith("10 min behind the coordinator's")
    assert "timedatectl" in clock["remedy"]


def test_a_loopback_advertisement_is_said_towards_a_run_on_loopback_only(
    coordinator: CoordinatorThread, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here it is right; that it is a problem elsewhere is shown in tests/wan."""
    _, told = asked(capsys, coordinator.address, "--run", "run", "--set", "local.advertise=127.0.0.1")
    (found,) = named(told, "advertised")
    assert found["grade"] == "ok"


def test_a_wrong_token_and_none(
    coordinator: CoordinatorThread, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATOLL_TOKEN", "x" * 32)
    code, told = asked(capsys, coordinator.address, "--run", "run")
    assert (code, named(told, "coordinator")[0]["about"]) == (5, "refused")
    assert "the run token does not fit" in named(told, "coordinator")[0]["sentence"]
    assert named(told, "versions"), "the machine is looked at all the same"
    monkeypatch.setenv("ATOLL_TOKEN", "short")
    code, told = asked(capsys, coordinator.address, "--run", "run")
    assert (code, "5 characters" in named(told, "coordinator")[0]["sentence"]) == (5, True)
    monkeypatch.delenv("ATOLL_TOKEN")
    code, told = asked(capsys, coordinator.address, "--run", "run")
    assert (code, named(told, "coordinator")[0]["sentence"]) == (5, "no run token")
    assert "ATOLL_TOKEN" in named(told, "coordinator")[0]["remedy"]


def test_another_run_is_named(coordinator: CoordinatorThread, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = asked(capsys, coordinator.address, "--run", "other")
    assert code == 5
    assert "runs 'run', not 'other'" in named(told, "coordinator")[0]["sentence"]


def test_no_coordinator_and_no_such_name(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        code, told = asked(capsys, f"127.0.0.1:{closed.getsockname()[1]}", "--run", "run")
    assert code == 4
    assert "connection refused" in named(told, "coordinator")[0]["sentence"]
    code, told = asked(capsys, "no-such-host.invalid:7070", "--run", "run")
    assert code == 4
    assert "no-such-host.invalid cannot be looked up" in named(told, "dns")[0]["sentence"]


def test_a_black_hole_is_given_up_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    """A listener that takes connections and never says a word, three times: the longest way to nowhere."""
    with contextlib.ExitStack() as opened:
        silent = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        addresses = ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in silent)
        began_s = time.monotonic()
        code, told = asked(capsys, addresses, "--run", "run")
        took_s = time.monotonic() - began_s
    assert code == 4
    assert named(told, "coordinator")[0]["sentence"].count("no answer in 5 s") == 3
    assert took_s < 30 + SLACK_S


def test_an_own_port_in_use_is_named(
    coordinator: CoordinatorThread, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, told = asked(
            capsys, coordinator.address, "--run", "run", "--set", f"local.port={port}", "--no-rates"
        )
    assert code == 3
    assert (
        f"cannot listen on 127.0.0.1 port {port}: address already in use"
        in named(told, "own port")[0]["sentence"]
    )


def test_settings_that_do_not_go_with_the_run_s_are_named(
    coordinator: CoordinatorThread, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = asked(capsys, coordinator.address, "--run", "run", "--set", "local.micro_batch=7")
    assert code == 3
    assert "local.micro_batch = 7 does not divide inner.batch_size" in named(told, "settings")[0]["sentence"]


# ---- where it listens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("advertise", ["localhost", "192.0.2.9:7001", "2001:db8::9"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_everywhere_is_ipv4_and_ipv6_whatever_is_advertised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str, advertise: str
) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("no IPv6 on this machine's loopback")
    with CoordinatorThread(tmp_path / "journal", host=host) as coordinator:
        _, told = asked(
            capsys,
            *(coordinator.address, "--run", "run", "--no-rates", "--set", f"local.advertise={advertise}"),
        )
    (inward,) = named(told, "ports in")
    assert (inward["grade"], inward["details"]["kind"]) == ("ok", "none"), inward


def test_without_ipv6_everywhere_is_ipv4(
    coordinator: CoordinatorThread, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = socket.socket, []

    def without(family: int = -1, *arguments: Any, **more: Any) -> socket.socket:
        if family == socket.AF_INET6:
            refused.append(family)
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, *arguments, **more)

    monkeypatch.setattr(examined.socket, "socket", without)
    arguments = ["--run", "run", "--no-rates", "--set", "local.advertise=localhost"]
    _, told = asked(capsys, coordinator.address, *arguments)
    assert refused, "it was tried"
    assert named(told, "ports in")[0]["grade"] == "ok"


def test_who_listens_elsewhere_than_the_coordinator_dials_is_not_said_to_be_shut(
    coordinator: CoordinatorThread, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with local.bind naming a VPN's interface, while the coordinator is outside."""
    arguments = ["--run", "run", "--no-rates", "--set", "local.bind=127.0.0.2"]
    _, told = asked(capsys, coordinator.address, *arguments)
    (inward,) = named(told, "ports in")
    assert inward["grade"] == "ok"
    assert inward["sentence"] == (
        "not tried: this peer listens at 127.0.0.2 alone, and the coordinator dials only 127.0.0.1"
    )
    assert named(told, "nat") == []
    assert not [each for each in problems(told) if each[1] != "machine"]


# ---- exit codes ------------------------------------------------------------------------------------------------------


def test_the_gravest_problem_decides() -> None:
    def of(*kinds: str) -> int:
        return exit_code([Finding(name=each, grade="problem", about=each, sentence="") for each in kinds])  # type: ignore[arg-type]

    assert of() == 0
    for about, code in EXIT_CODES.items():
        assert of(about) == code
    assert of("clock", "in", "out", "machine", "refused", "coordinator") == 4
    assert of("clock", "in", "machine") == 3
    assert of("clock", "in", "out") == 11
    assert exit_code([Finding(name="x", grade="warning", about="clock", sentence="")]) == 0


def test_spans() -> None:
    assert [span(each) for each in (0.0001, 0.012, 3.4, 600, 9000)] == [
        "1 ms",
        "12 ms",
        "3.4 s",
        "10 min",
        "2.5 h",
    ]
