"""README's library example, typed as it stands there: two terminals, one run, one digest."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.swarm import environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[2]


def terminals() -> tuple[str, str]:
    """The two blocks of commands that start examples/own_loop.py."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    first, second = [text for kind, text in fenced if not kind and "python examples/own_loop.py" in text]
    return first, second


def test_the_two_terminals(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    kept = {name: value for name, value in environment().items() if not name.startswith("ATOLL_")}
    first, second = terminals()
    # `wait` ends the coordinator's terminal only once the run is over; the reader of README would just look.
    windows = []
    for block in (first + "wait\n", second):
        log = (tmp_path / f"terminal-{len(windows)}.log").open("wb")
        windows.append(
            subprocess.Popen(
                ["bash", "-ec", block],
                cwd=tmp_path,
                env=kept,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        )
        log.close()
        if len(windows) == 1:
            wait_for(tmp_path / "runs" / "token")
    codes = [window.wait(timeout=200) for window in windows]
    outputs = [(tmp_path / f"terminal-{i}.log").read_text() for i in range(2)]
    assert codes == [0, 0], outputs
    digests = [re.findall(r"digest (\w+)", output)[-1] for output in outputs]
    assert digests[0] == digests[1]
    assert "version 20" in outputs[1]


def wait_for(path: Path, within_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not (path.exists() and path.stat().st_size):
        assert time.monotonic() < deadline_s, f"no {path}"
        time.sleep(0.02)


def test_the_example_is_short() -> None:
    assert len((ROOT / "examples" / "own_loop.py").read_text().splitlines()) <= 60
