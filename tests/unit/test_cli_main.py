"""The commands' manners: help worth reading, one line per mistake, the documented exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll import __version__
from atoll.addresses import parse_address
from atoll.cli.coordinator import settings_of
from atoll.cli.main import BENCH_COMMANDS, COMMANDS, run
from atoll.config.load import load
from atoll.errors import AtollError, ConfigError

TOKEN = "a token for tests only"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("ATOLL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """Exit code and stderr; nothing may be said on stdout."""
    code = run(arguments)
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    return code, said.err.splitlines()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"atoll {__version__}"


def test_help_lists_every_command_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in [*COMMANDS, "config"])
    for cls in _family(AtollError):
        assert f"{cls.exit_code} " in text


def _family(cls: type[AtollError]) -> list[type[AtollError]]:
    mine = [each for each in cls.__subclasses__() if each.__module__ == "atoll.errors"]
    return [each for child in mine for each in [child, *_family(child)] if each.exit_code > 1]


@pytest.mark.parametrize(
    "command", [*COMMANDS, *(f"bench {name}" for name in BENCH_COMMANDS), "config show", "config schema"]
)
def test_every_command_has_a_help_worth_reading(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: atoll {command}")
    assert f"atoll {command} " in text.split("\n", 1)[1] or command == "config schema"  # an example
    assert len(text.splitlines()) >= 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tarin"], 'unknown command "tarin"'),
        (["config", "show", "--ste", "a.b=1"], "unknown option"),
        (["config", "show", "no.toml"], "cannot read no.toml: no such file or directory"),
        (["config", "show", "--set", "outer.inner_step=3"], "did you mean outer.inner_steps?"),
        (["launch"], "requires an argument"),
        (["launch", "no.toml", "--peers", "many"], 'unable to convert "many" into int'),
        (["demo", "--peers", "0"], "both must be above 0"),
        (["coordinator"], "no run: give a RUN.toml, or a name with --run NAME"),
        (["coordinator", "--run", "a/b"], "--set run.name"),
        (["train", "no.toml"], "cannot read no.toml"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, (line,) = refused(capsys, *arguments)
    assert code == 2
    assert line.startswith("atoll: error: ")
    assert says.lower() in line.lower()


def test_all_mistakes_of_a_file_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("[outer]\nlr = 0\ninner_stesp = 3\n")
    code, lines = refused(capsys, "train", "run.toml")
    assert code == 2
    assert lines == [
        "atoll: error: run.toml:2: outer.lr = 0: must be above 0",
        "atoll: error: run.toml:3: outer.inner_stesp = 3: unknown key; did you mean outer.inner_steps?",
    ]


def test_no_token_is_exit_5_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("")
    for arguments in (["train", "run.toml"], ["coordinator", "run.toml"]):
        code, (line,) = refused(capsys, *arguments)
        assert code == 5
        assert "no run token: set ATOLL_TOKEN" in line
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize(
    ("journal", "settings", "says"),
    [
        ("etcd://", [], "'' is no endpoint of etcd; write etcd://HOST:2379 or"),
        (
            "etcd://a:1",
            ["heartbeat_s=2.6", "dead_s=6"],
            "lease_s = 5.0 is below 2 x heartbeat_s = 5.2: raise it",
        ),
        (
            "etcd://a:1",
            ["lease_s=40", "coordinator_lost_s=45"],
            "= 45.0 must be above lease_s + dead_s = 45.0",
        ),
        ("etcd://a:1", ["lease_s=1"], "membership.lease_s = 1"),
    ],
)
def test_a_journal_in_etcd_wants_waits_that_go_together(
    journal: str,
    settings: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN)
    sets = [part for each in settings for part in ("--set", f"membership.{each}")]
    code, (line,) = refused(capsys, "coordinator", "--run", "r", "--journal", journal, *sets)
    assert code == 2
    assert says in line
    assert not list(tmp_path.iterdir())


def test_unknown_variables_are_exit_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_OUTER__LRR", "1")
    code, (line,) = refused(capsys, "config", "show")
    assert code == 2
    assert "did you mean ATOLL_OUTER__LR?" in line


def test_a_port_in_use_is_exit_3(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = run(["coordinator", "--run", "r", "--bind", f"127.0.0.1:{port}"])
    said = capsys.readouterr()
    assert code == 3
    assert f"127.0.0.1:{port}" in said.err
    assert "Traceback" not in said.err


def test_a_folder_that_cannot_be_written_is_exit_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN)
    (tmp_path / "file").write_text("")
    code, (line,) = refused(capsys, "coordinator", "--run", "r", "--out", "file/folder")
    assert code == 3
    assert line == (
        "atoll: error: cannot write events to file/folder/coordinator.jsonl: not a directory; "
        "make room there or set local.out"
    )


def test_config_show_prints_what_loads_back_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "show", "--set", "outer.lr=0.5", "--set", "outer.inner_steps=7"]) == 0
    (tmp_path / "shown.toml").write_text(capsys.readouterr().out)
    assert load(tmp_path / "shown.toml", [], {}) == load(None, ["outer.lr=0.5", "outer.inner_steps=7"], {})


def test_config_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "schema"]) == 0
    assert "outer" in json.loads(capsys.readouterr().out)["properties"]


@pytest.mark.parametrize(("place", "code"), [("| head -1", 0), ("> /dev/full", 3)])
def test_what_a_command_is_for_is_kept_or_not_wanted(tmp_path: Path, place: str, code: int) -> None:
    script = f'set -o pipefail; "{sys.executable}" -m atoll config show {place}'
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == code
    assert ended.stderr == (
        "atoll: error: cannot write to stdout: no space left on device; make room, or choose another file\n"
        if code
        else ""
    )


@pytest.mark.fault
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_coordinator_ends_politely_on_a_signal(tmp_path: Path, signum: signal.Signals, code: int) -> None:
    environment = {**os.environ, "ATOLL_TOKEN": TOKEN, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = ["coordinator", "--run", "r", "--bind", "127.0.0.1:0", "--out", "c"]
    command = [sys.executable, "-m", "atoll", *arguments]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = [process.stdout.readline()]
    while "join:" not in said[-1]:
        said.append(process.stdout.readline())
        assert said[-1], said
    address = next(word.strip(";") for word in "".join(said).split() if word.startswith("127.0.0.1:"))
    process.send_signal(signum)
    began_s = time.monotonic()
    assert process.wait(20) == code
    assert time.monotonic() - began_s < 10
    host, port = parse_address("--bind", address)
    socket.create_server((host, port)).close()  # the port is free again
    with process.stdout:
        said.append(process.stdout.read())
    everything = "".join(said) + (tmp_path / "c" / "coordinator.jsonl").read_text()
    assert TOKEN not in everything
    assert f'"exit_code":{code}' in everything


def test_addresses() -> None:
    assert parse_address("--bind", "0.0.0.0:7070") == ("0.0.0.0", 7070)
    assert parse_address("--bind", "[::1]:0") == ("::1", 0)
    for wrong in ("7070", ":7070", "host:", "host:99999", "host:seven"):
        with pytest.raises(ConfigError, match="write it as host:port"):
            parse_address("--bind", wrong)


def test_the_coordinator_decides_by_the_configured_values() -> None:
    config = load(
        None, ["run.name=r", "membership.start_peers=3", "membership.dead_s=7", "run.max_seconds=60"], {}
    )
    settings = settings_of(config)
    assert (settings.run, settings.start_peers, settings.max_seconds) == ("r", 3, 60)
    assert settings.timeouts.dead_s == 7
    assert settings.timeouts.vote_s == config.membership.vote_s
