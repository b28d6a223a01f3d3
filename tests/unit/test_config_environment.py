"""The token and the ATOLL_ variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.config.environment import for_child, for_sidecar, run_token, settings_variables
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
