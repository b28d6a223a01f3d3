"""The benchmark of the inner step on several ranks runs, and times both loops on the same steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_both_loops_are_timed() -> None:
    command = [sys.executable, REPOSITORY / "benchmarks/fsdp_overhead.py", "--quick", "--turns", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)

    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["steps_each"] == 20
    assert result["ranks"] == 2
    assert len(result["ratios"]) == len(result["cpu_ratios"]) == 2
    assert min(result["ours_ms"], result["bare_ms"]) > 0
