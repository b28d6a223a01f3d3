"""Plays plain-text scenarios against the two machines; `python tests/scenario/runner.py FILE...` writes what
happens.

A line is a command, its indented lines are what the machine did: `->` its reason, then the effects in order.
`#` lines are for the reader. Acknowledged heartbeats are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

from scenario.coordinator_script import CoordinatorScript
from scenario.member_script import MemberScript

SCRIPTS = {"coordinator": CoordinatorScript, "member": MemberScript}


def play(path: Path) -> str:
    """The scenario's text with what really happened in the indented lines."""
    script = SCRIPTS[path.parent.name]()
    lines: list[str] = []
    for line in path.read_text().splitlines():
        if line.startswith("  "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            command, *words = line.split()
            lines += [f"  {told}" for told in script.run(command, words)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(play(Path(name)))
