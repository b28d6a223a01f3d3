"""docs/three-sites.md: every command of Atoll's is one that its parser takes; every file that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.commands import commands_of, complaint_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "three-sites.md"
COMMANDS = commands_of(PAGE)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_is_one(words: list[str]) -> None:
    assert complaint_of(words) is None


def test_the_commands_were_found() -> None:
    """All that the page speaks of: else the check above would check nothing."""
    found = {words[0] for words in COMMANDS}
    assert {"plan", "coordinator", "join", "status", "stop", "leave", "evict", "checkpoints"} <= found
    assert sum(words[0] == "join" and len(words) > 3 for words in COMMANDS) >= 3
    assert any("--set" in words and "local.peer=den" in words for words in COMMANDS), (
        "Docker's is one of them"
    )


@pytest.mark.parametrize(
    "line", ["plans run.toml", "plan run.toml --rank 2", "join host:7070", "checkpoints lsx a"]
)
def test_a_command_that_is_none_would_be_found(line: str) -> None:
    assert complaint_of(line.split()) is not None


def test_every_file_is_there() -> None:
    text = PAGE.read_text()
    named = set(re.findall(r"\b(?:deploy|recipes)/[\w./-]+\w", text))
    assert len(named) >= 5
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_settings_are_settings() -> None:
    from atoll.config.keys import dotted_names

    sections = "run|model|data|inner|outer|membership|net|checkpoint|eval|local"
    named = set(re.findall(rf"\b((?:{sections})\.[a-z_]+)\b", PAGE.read_text()))
    assert len(named) > 5
    assert named - set(dotted_names()) - {"run.toml", "model.safetensors"} == set()
