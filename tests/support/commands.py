"""Command lines as pages and scripts have them, put to Atoll's own parser: nothing is run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from cyclopts import CycloptsError

from atoll.cli.main import build_app


def complaint_of(words: list[str]) -> str | None:
    """What is wrong with `atoll WORDS`; None if its parser takes it. A command that stands alone is only named."""
    app = build_app()
    try:
        commands, _, _ = app.parse_commands(words)
        if not commands:
            return f"there is no command {words[:1]}"
        if len(commands) < len(words):
            app.parse_args(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return str(error)
    return None


def commands_of(page: Path) -> list[list[str]]:
    """The words after `atoll` of every command in the page's blocks and in its inline code. What a shell puts in their
    place (`$PWD`, comments) stays as it is."""
    text = page.read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    found = []
    for line in [*lines, *inline]:
        match = re.search(r"(?:^|[ /])atoll ((?:join|[a-z]+) .*|[a-z]+)$", line)
        if match and not re.search(r"(?:--tag|-u) atoll", line):
            found.append(shlex.split(match[1]))
    return found
