"""`atoll doctor` for a run with an authority: everything over TLS, and what is wrong with a join line or token."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.swarm import environment
from support.trusted_swarm import TrustedSwarm

pytestmark = [pytest.mark.fault, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrustedSwarm]:
    """One peer that trains."""
    with TrustedSwarm(tmp_path_factory.mktemp("swarm"), start_peers=1) as swarm:
        swarm.trusted("p0", 1.0, "--rounds", 10_000, "--round-s", 1.0)
        swarm.wait(lambda: len(swarm.events("RoundCommitted")) >= 2, within_s=60, what="two rounds")
        yield swarm


def examined(
    swarm: TrustedSwarm, *arguments: str, token_file: Path | None = None
) -> tuple[int, dict[str, Any]]:
    done = swarm.ordered(
        *("doctor", "@", "--run", swarm.run, "--json", *arguments), token_file=token_file or swarm.token_file
    )
    assert done.stdout.startswith("{"), done.stderr
    told = json.loads(done.stdout)
    print(json.dumps([each for each in told["findings"] if each["about"] != "machine"], indent=1))
    return done.returncode, told


def problems(told: dict[str, Any]) -> list[tuple[str, str]]:
    found = [(each["name"], each["about"]) for each in told["findings"] if each["grade"] == "problem"]
    return [each for each in found if each[1] != "machine"]


def test_the_join_token_is_enough_and_ways_are_measured_over_tls(swarm: TrustedSwarm) -> None:
    rounds = len(swarm.events("RoundCommitted"))
    _, told = examined(swarm)
    assert problems(told) == []
    (way,) = told["members"]
    assert (way["peer"], way["why_not"]) == ("p0", "")
    assert way["bytes_per_s"] > 0
    swarm.wait(lambda: len(swarm.events("RoundCommitted")) > rounds, within_s=30, what="the run goes on")


def test_another_authority_is_named(swarm: TrustedSwarm) -> None:
    line = [swarm.address, "--run", swarm.run, "--authority", "sha256:" + "ab" * 32]
    done = subprocess.run(
        [*(sys.executable, "-m", "atoll", "doctor", *line), "--json", "--token-file", str(swarm.token_file)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = json.loads(done.stdout)
    assert (done.returncode, problems(told)) == (5, [("coordinator", "refused")])
    (found,) = [each for each in told["findings"] if each["name"] == "coordinator"]
    assert "--authority" in found["remedy"]


def test_a_token_that_may_only_watch_is_refused(swarm: TrustedSwarm, tmp_path: Path) -> None:
    made = swarm.ordered("token", "create", "@", "--scope", "watch")
    assert made.returncode == 0, made.stderr
    watching = tmp_path / "watch.token"
    watching.write_text(made.stdout.strip().splitlines()[0])
    code, told = examined(swarm, token_file=watching)
    assert (code, problems(told)) == (5, [("coordinator", "refused")])
    assert "may watch, and this needs one that may join" in json.dumps(told)
