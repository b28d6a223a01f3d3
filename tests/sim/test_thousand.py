"""Many peers that come and go: the machine commits every round. How long it takes is printed, and hardly asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

THOUSAND = Path(__file__).parents[2] / "benchmarks" / "thousand.py"


def test_hundreds_of_peers_with_churn_cost_the_coordinator_little() -> None:
    command = [sys.executable, str(THOUSAND), "--peers", "200", "--rounds", "2", "--churn", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["peers"], found["rounds"], found["churn"]) == (200, 2, 5)
    assert 0 < found["decide_ms"] < found["all_ms"] < 20_000
