"""What a flood of connections that prove nothing costs a run: rounds, the coordinator's memory, its processor time.

A run of two peers on loopback, made with --new, so that every connection is a TLS handshake. Windows with and without
the flood take turns; round times are compared by their medians. In the first flooded window a newcomer joins.

    python benchmarks/strangers.py [--per-second 200] [--seconds 30] [--turns 2]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import secrets
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.trusted_swarm import TrustedSwarm

RATIO_MOST, BYTES_MOST = 1.20, 64 << 20


class Flood:
    """Opens connections at a steady rate from one source, says nonsense, and hangs up."""

    def __init__(self, port: int, per_s: float) -> None:
        self._port, self._per_s = port, per_s
        self._ends = threading.Event()
        self.opened = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ends.set()
        self._thread.join(10)

    def _run(self) -> None:
        started_s = time.monotonic()
        while not self._ends.is_set():
            due = int((time.monotonic() - started_s) * self._per_s)
            while self.opened < due:
                self.opened += 1
                with contextlib.suppress(OSError):
                    with socket.create_connection(
                        ("127.0.0.1", self._port), timeout=5, source_address=("127.0.0.7", 0)
                    ) as stranger:
                        stranger.sendall(secrets.token_bytes(200))
            time.sleep(0.002)


def round_times_s(swarm: TrustedSwarm, since_s: float) -> list[float]:
    """Seconds from one commit to the next, of the commits after `since_s` (Unix time)."""
    from atoll.events import read_events

    told = [
        line.wall_time_s
        for _, line, _ in read_events(swarm.own / "coordinator.jsonl")
        if line.event["type"] == "RoundCommitted" and line.wall_time_s >= since_s
    ]
    return [later - earlier for earlier, later in itertools.pairwise(told)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--per-second", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each window")
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    quiet_s: list[float] = []
    flooded_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder, TrustedSwarm(Path(folder), start_peers=2) as swarm:
        forever = ["--rounds", 1_000_000, "--round-s", 0.2, "--numel", 100_000]
        a, b = swarm.trusted("a", 1, *forever), swarm.trusted("b", 3, *forever)
        swarm.wait(lambda: a.rounds() and b.rounds(), within_s=60, what="a round")
        coordinator = psutil.Process(swarm.coordinator.pid)
        port = int(swarm.address.rpartition(":")[2])
        before_bytes, most_bytes, flood_cpu_s, quiet_cpu_s, opened = (
            coordinator.memory_info().rss,
            0,
            0.0,
            0.0,
            0,
        )
        joined_s = None
        for turn in range(args.turns):
            for flooded in (False, True):
                cpu_s, since_s = sum(coordinator.cpu_times()[:2]), time.time()
                flood = Flood(port, args.per_second) if flooded else None
                if flooded and turn == 0:
                    asked_s = time.monotonic()
                    swarm.trusted("late", 8, *forever)
                    swarm.wait(lambda: swarm.events("CaughtUp", "late"), within_s=60, what="the newcomer")
                    joined_s = time.monotonic() - asked_s
                    since_s = time.time()  # with one peer more, rounds are others
                end_s = time.monotonic() + args.seconds
                while time.monotonic() < end_s:
                    most_bytes = max(most_bytes, coordinator.memory_info().rss)
                    time.sleep(0.1)
                used_s = sum(coordinator.cpu_times()[:2]) - cpu_s
                if flood is not None:
                    flood.end()
                    opened += flood.opened
                    flood_cpu_s += used_s
                else:
                    quiet_cpu_s += used_s
                (flooded_s if flooded else quiet_s).extend(round_times_s(swarm, since_s))
        swarm.assert_one_history()
    ratio = statistics.median(flooded_s) / statistics.median(quiet_s)
    grown = most_bytes - before_bytes
    window_s = args.turns * args.seconds
    print(f"{opened} connections, {args.per_second:g} a second, that prove nothing")
    print(
        f"rounds: {statistics.median(quiet_s):.3f} s without, {statistics.median(flooded_s):.3f} s with: "
        f"x {ratio:.3f} (asked: below {RATIO_MOST:g})"
    )
    print(f"the coordinator's memory grew by {grown / 2**20:.1f} MiB (asked: below {BYTES_MOST >> 20})")
    print(
        f"its processor time: {100 * quiet_cpu_s / window_s:.1f} % of a core without, "
        f"{100 * flood_cpu_s / window_s:.1f} % with"
    )
    print(f"a newcomer was in {joined_s:.1f} s after it was started")


if __name__ == "__main__":
    main()
