"""A whole join over an emulated wide-area network: how long until it counts, from whom, and what it costs the members.

    python benchmarks/joiner.py                          40 MB of state, 100 Mbit/s, 20 ms, three donors (Linux, root)
    python benchmarks/joiner.py --mbit 50 --keep runs/joiner

Members train with the real engine; each site has its own up and down link. The joiner is a whole process, but its start
(Python, torch) is not timed: the join request is the moment when the coordinator accepted its connection. Its first
counted round is the first commit that it contributed to; the bound is the state's bytes at the payload rate of its
link, plus one round. The last line is one JSON object. Ratios are what matters; few cores add to them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from atoll.cli.bench.bounds import payload_rate  # noqa: E402
from atoll.events import read_events  # noqa: E402
from support.wan_crew import WANLAB, why_not  # noqa: E402
from support.wan_swarm import WanSwarm, star  # noqa: E402

DONORS = ("d0", "d1", "d2")
JOINER = "j"
INNER_STEPS = 4
BEFORE, AFTER = 10, 3
"""Rounds before the joiner comes, to know their pace, and rounds in which it counts. After eight rounds a snapshot is
fewer bytes than all updates (int8: a byte a parameter each)."""
STATE_BYTES_PER_ELEMENT = 8


class Join:
    """One join, from its files."""

    def __init__(self, swarm: WanSwarm, numel: int, mbit: float) -> None:
        self.swarm, self.numel, self.mbit = swarm, numel, mbit

    def begun(self) -> bool:
        return len(self.commits()) >= BEFORE

    def counted(self) -> list[tuple[float, dict[str, Any]]]:
        return [(at, event) for at, event in self.commits() if JOINER in event["contributors"]]

    def commits(self) -> list[tuple[float, dict[str, Any]]]:
        return self.told("RoundCommitted")

    def told(self, kind: str, source: str = "coordinator") -> list[tuple[float, dict[str, Any]]]:
        """When, and what."""
        path = self.swarm.folder / self.swarm.run / f"{source}.jsonl"
        lines = (line for _, line, _ in read_events(path)) if path.exists() else ()
        return [(line.wall_time_s, line.event) for line in lines if line.event["type"] == kind]

    def report(self) -> dict[str, Any]:
        asked_s = next(at for at, event in self.told("PeerConnected") if event["peer"] == JOINER)
        joined_s = next(at for at, event in self.told("PeerJoined") if event["peer"] == JOINER)
        caught_up = [event for _, event in self.told("CaughtUp", JOINER)]
        counted_s = self.counted()[0][0]
        times_s = [at for at, _ in self.commits()]
        round_s = statistics.median(gaps(times_s, times_s[1], asked_s))
        meanwhile_s = gaps(times_s, asked_s, joined_s)
        state_bytes = STATE_BYTES_PER_ELEMENT * self.numel
        fetch_s = state_bytes / payload_rate(self.mbit)
        shares = {}
        for event in caught_up:
            for donor, number in event["bytes_by_source"].items():
                shares[donor] = shares.get(donor, 0) + number
        fetched = sum(shares.values())
        updates = sum(event["updates"] for event in caught_up)
        snapshots = sum(event["snapshot_version"] is not None for event in caught_up)
        needed_bytes = snapshots * state_bytes + updates * self.update_bytes()
        return {
            "state_mb": round(state_bytes / 1e6, 1),
            "mbit": self.mbit,
            "round_s": round(round_s, 2),
            "request_to_member_s": round(joined_s - asked_s, 2),
            "request_to_counted_s": round(counted_s - asked_s, 2),
            "bound_s": round(fetch_s + round_s, 2),
            "x_bound": round((counted_s - asked_s) / (fetch_s + round_s), 3),
            "x_fetch": round((joined_s - asked_s) / fetch_s, 3),
            "catch_up_s": [round(event["seconds"], 2) for event in caught_up],
            "shares": {donor: round(number / fetched, 3) for donor, number in sorted(shares.items())},
            "updates_replayed": updates,
            "snapshots": snapshots,
            "fetched_x": round(fetched / needed_bytes, 4),
            "members_slower": round(statistics.median(meanwhile_s) / round_s - 1, 3) if meanwhile_s else None,
            "members_wire_slower": self.wire_slower(asked_s, joined_s),
            "rounds_meanwhile": len(meanwhile_s),
        }

    def wire_slower(self, asked_s: float, joined_s: float) -> float | None:
        """The same for the seconds on the wire alone: what the joiner takes of the members' links, whatever it takes
        of a processor that all share here."""
        told = [(at, event["wire_s"]) for donor in DONORS for at, event in self.told("RoundApplied", donor)]
        before = [wire_s for at, wire_s in told if at < asked_s]
        meanwhile = [wire_s for at, wire_s in told if asked_s < at - wire_s < joined_s]
        return round(statistics.median(meanwhile) / statistics.median(before) - 1, 3) if meanwhile else None

    def update_bytes(self) -> int:
        """Of one update in int8: a byte an element, and four for each block of 256."""
        return self.numel + 4 * -(-self.numel // 256)


def gaps(times_s: Sequence[float], begin_s: float, end_s: float) -> list[float]:
    """Seconds from commit to commit, of rounds that touch a stretch of time."""
    return [b - a for a, b in itertools.pairwise(times_s) if b > begin_s and a < end_s]


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    numel = int(options.mb * 1e6) // STATE_BYTES_PER_ELEMENT
    network = star((*DONORS, JOINER), f"{options.mbit:g}mbit", options.rtt_ms)
    peer = ["--numel", numel, "--codec", "int8", "--rounds", 100_000, "--inner-steps", INNER_STEPS]
    peer += ["--step-s", options.round_s / INNER_STEPS]
    with new_lab(network) as lab, WanSwarm(lab, folder, start_peers=len(DONORS)) as swarm:
        join = Join(swarm, numel, options.mbit)
        for number, name in enumerate(DONORS):
            swarm.quadratic(name, 2.0**number, *peer)
        swarm.wait(join.begun, within_s=240, what=f"{BEFORE} rounds")
        swarm.quadratic(JOINER, 8.0, *peer)
        swarm.wait(lambda: len(join.counted()) >= AFTER, within_s=240, what="rounds with the joiner")
        swarm.assert_one_history()
        late_ms = lab.stats().get("late_max_us", 0) / 1e3
        return {**join.report(), "emulator_late_ms": round(late_ms, 1)}


def new_lab(network: dict[str, Any]) -> Any:
    sys.path.insert(0, str(WANLAB.parent))
    import wanlab

    return wanlab.Lab(network, name="joiner")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=40.0, help="of state: weights and outer momentum")
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--rtt-ms", type=float, default=20.0)
    parser.add_argument("--round-s", type=float, default=2.0, help="inner work of a round")
    parser.add_argument("--keep", type=Path, default=None, help="folder for logs and events; must not exist")
    options = parser.parse_args()
    if reason := why_not():
        print(f"joiner: {reason}", file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory(prefix="atoll-joiner-") as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        found = measure(folder, options)
    counted = f"counted {found['request_to_counted_s']} s after its request"
    print(f"{counted}, {found['x_bound']} x of bytes / rate + one round")
    print(f"fetched {found['fetched_x']} x of state and updates, by donor {found['shares']}")
    print(
        f"members' rounds longer by {found['members_slower']}, on the wire by {found['members_wire_slower']}"
    )
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
