"""What `atoll plan` says of memory is what real peers take, within a tenth."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.swarm import environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "sync_memory.py"


@pytest.mark.parametrize("num_ranks", [pytest.param(count, marks=pytest.mark.slow) for count in (1, 2)])
def test_peers_take_what_the_plan_says(num_ranks: int) -> None:
    kept = {name: value for name, value in environment().items() if not name.startswith("ATOLL_")}
    command = [sys.executable, str(BENCHMARK), "--json", "--set", "run.steps=9"]
    command += ["--ranks", str(num_ranks)]
    done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["staging"] == pytest.approx(1.0, abs=0.1)
    assert len(said["rows"]) == num_ranks + 1
    for row in said["rows"].values():
        assert row["rounds"] == pytest.approx(1.0, abs=0.1), said
        assert row["whole"] == pytest.approx(1.0, abs=0.1), said
        assert row["sync"] < 1.0, "later rounds allocate nothing worth mentioning"
