"""How long a peer that is gone holds up the others: a killed one a heartbeat, a frozen one the dead timeout.

The network that swallows everything is in tests/wan/test_membership_wan.py. What is compared is the time from the last
commit before the fault to the next one with the run's own pace; a loaded machine may add SLACK_S.
"""

from __future__ import annotations

import itertools
import signal
import statistics
from pathlib import Path

import pytest

from atoll.events import read_events
from support.slack import SLACK_S
from support.swarm import Swarm

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

ROUND_S = 1.0
GRACE_S = 2.0
NEVER_S = 60.0  # what would end the wait too, but far too late


def commit_times(swarm: Swarm) -> list[float]:
    told = read_events(swarm.folder / swarm.run / "coordinator.jsonl")
    return [line.wall_time_s for _, line, _ in told if line.event["type"] == "RoundCommitted"]


@pytest.mark.parametrize(
    ("hit", "dead_s", "allowed_s"),
    [
        pytest.param(signal.SIGKILL, NEVER_S, ROUND_S + GRACE_S, id="killed"),
        pytest.param(signal.SIGSTOP, 2.0, 2.0 + GRACE_S, id="frozen"),
    ],
)
def test_a_peer_that_is_gone_costs_its_detection(
    tmp_path: Path, hit: signal.Signals, dead_s: float, allowed_s: float
) -> None:
    waits = {"dead_s": dead_s, "ready_wait_s": NEVER_S, "attempt_s": NEVER_S, "vote_s": NEVER_S}
    waits |= {"coordinator_lost_s": 2 * NEVER_S, "stall_s": 2 * NEVER_S}
    with Swarm(tmp_path, start_peers=3, **waits) as swarm:
        for name, center in (("a", 1), ("b", 3), ("c", 8)):
            swarm.quadratic(name, center, "--rounds", 10_000, "--round-s", ROUND_S)
        swarm.wait(lambda: len(swarm.events("RoundCommitted")) >= 5, within_s=90, what="five rounds")
        swarm.peers["c"].send(hit)
        before = len(swarm.events("RoundCommitted"))
        swarm.wait(
            lambda: len(swarm.events("RoundCommitted")) > before + 1, within_s=NEVER_S, what="two more rounds"
        )
        (lost,) = swarm.events("PeerLost")
        assert lost["peer"] == "c"
        first_without = next(
            number
            for number, event in enumerate(swarm.events("RoundCommitted"))
            if "c" not in event["members"]
        )
        times_s = commit_times(swarm)
        gaps_s = [after - earlier for earlier, after in itertools.pairwise(times_s)]
        pace_s = statistics.median(gaps_s[: before - 1])
        later_s = gaps_s[first_without - 1] - pace_s
        print(f"{hit.name}: the next commit came {later_s:.2f} s later than at the pace of {pace_s:.2f} s")
        assert later_s <= allowed_s + SLACK_S
