"""The token and the ATOLL_ variables."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.config.environment import (
    RankEnvironment,
    for_child,
    for_rank,
    for_sidecar,
    of_process,
    rank_environment,
    run_token,
    settings_variables,
)
from atoll.errors import ConfigError, Refused


def test_settings_are_found_by_section_and_key() -> None:
    found = settings_variables({"ATOLL_OUTER__LR": "1", "ATOLL_TOKEN": "x", "HOME": "/"})
    assert found == {"ATOLL_OUTER__LR": (("outer", "lr"), "1")}


def test_unknown_variables_are_refused_together_with_suggestions() -> None:
    with pytest.raises(ConfigError) as caught:
        settings_variables({"ATOLL_OUTER__LRR": "1", "ATOLL_TOKN": "x", "ATOLL_XYZZY": "1"})
    assert str(caught.value).splitlines() == [
        "ATOLL_OUTER__LRR: unknown environment variable; did you mean ATOLL_OUTER__LR?",
        "ATOLL_TOKN: unknown environment variable; did you mean ATOLL_TOKEN?",
        "ATOLL_XYZZY: unknown environment variable; settings look like ATOLL_OUTER__LR",
    ]


def test_the_token_comes_from_the_named_file_first(tmp_path: Path) -> None:
    named, other = tmp_path / "named", tmp_path / "other"
    named.write_text("from the named file\n")
    other.write_text("from the other file\n")
    environ = {"ATOLL_TOKEN_FILE": str(other), "ATOLL_TOKEN": "from the variable"}
    assert run_token(named, environ) == b"from the named file"
    assert run_token(None, environ) == b"from the other file"
    assert run_token(None, {"ATOLL_TOKEN": "from the variable"}) == b"from the variable"


def test_no_token_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        Refused, match="no run token: set ATOLL_TOKEN, or name a file by --token-file"
    ) as caught:
        run_token(None, {})
    assert caught.value.exit_code == 5
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(Refused, match="is empty"):
        run_token(empty, {})
    with pytest.raises(ConfigError, match="cannot read the token file"):
        run_token(tmp_path / "none", {})


def test_a_child_gets_the_token_and_no_settings() -> None:
    given = {"PATH": "/bin", "ATOLL_OUTER__LR": "1", "ATOLL_TOKEN_FILE": "/secret"}
    assert for_child("the token", given) == {"PATH": "/bin", "ATOLL_TOKEN": "the token"}


def test_a_sidecar_gets_nothing_of_atolls() -> None:
    given = {"PATH": "/bin", "ATOLL_OUTER__LR": "1", "ATOLL_TOKEN": "secret", "ATOLL_TOKEN_FILE": "/secret"}
    assert for_sidecar(given) == {"PATH": "/bin"}


def test_without_a_launcher_there_is_one_rank() -> None:
    assert rank_environment({"LOCAL_RANK": "3"}) == RankEnvironment()


def test_what_torchrun_says() -> None:
    environ = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    assert rank_environment(environ) == RankEnvironment(
        rank=5,
        local_rank=1,
        num_ranks=8,
        local_ranks=4,
        master_addr="node0",
        master_port=29500,
        launcher_serves=True,
        start=2,
    )


def test_what_a_rank_is_told_is_what_it_reads(tmp_path: Path) -> None:
    meeting = tmp_path / "a b"
    given = for_rank(1, 2, meeting, {"PATH": "/bin"})
    assert rank_environment(given) == RankEnvironment(
        rank=1, local_rank=1, num_ranks=2, local_ranks=2, rendezvous=str(meeting)
    )
    assert settings_variables(given) == {}, "it is no setting"


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK = 2 does not fit WORLD_SIZE = 2: ranks are 0 to 1"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK = 'x' is not a whole number from 0 on"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK = '-1' is not a whole number from 0 on"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE = '0' is not a whole number from 1 on"),
        (
            {"WORLD_SIZE": "2"},
            "RANK is not set, but a launcher's other variables are; torchrun sets them all",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "WORLD_SIZE = 2, but neither MASTER_ADDR nor ATOLL_RENDEZVOUS says where the ranks meet; "
            "start them by torchrun or atoll launch --ranks",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"},
            "MASTER_PORT is not set, but a launcher's other variables are; torchrun sets them all",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "ATOLL_RENDEZVOUS": "/tmp/x"},
            "ATOLL_RENDEZVOUS = '/tmp/x' names no file; it looks like file:///run/atoll/ranks",
        ),
        (
            {"ATOLL_RENDEZVOUS": "file:///tmp/x"},
            "ATOLL_RENDEZVOUS is set, but not RANK and WORLD_SIZE: a launcher sets all three",
        ),
    ],
)
def test_a_launcher_that_makes_no_sense_is_one_line(environ: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rank_environment(environ)
    assert str(caught.value) == says


def test_a_rank_that_is_started_again_alone_is_nobodys_rank() -> None:
    said = for_rank(1, 3, Path("/tmp/meet"), {"HOME": "/root", "ATOLL_TOKEN": "t"})
    process = SimpleNamespace(environ=lambda: said)
    assert of_process(process) == {"HOME": "/root", "ATOLL_TOKEN": "t"}  # type: ignore[arg-type]
    assert "RANK" not in for_child("u", said)
