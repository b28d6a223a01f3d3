"""The soak itself: a short one with a fixed seed in which all that it checks holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_soak_finds_nothing_wrong(tmp_path: Path) -> None:
    command = [sys.executable, str(SOAK), "--seconds", "28", "--every-s", "3", "--seed", "11"]
    done = subprocess.run(
        [*command, "--keep", str(tmp_path / "soak")], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    for name in ("wrong_sums", "forks", "hangs", "ended_alone", "left_processes"):
        assert report[name] == 0, done.stdout
    assert report["leaked_descriptors"] <= 0
    assert report["seed"] == 11
    assert sum(report["faults"].values()) >= 2
    assert set(report["rounds_lost"]) == set(report["faults"])
    assert report["rounds"] > 0, done.stdout  # how many is the machine's affair, and `make soak` tells
    assert report["rounds_fault_free"] > 0
