"""Six small peers under random faults: does every round stay right, and how many are lost?

    python benchmarks/soak.py --seconds 300
    python benchmarks/soak.py --seconds 60 --seed 7 --keep runs/soak

A first part without faults (15 % of the time, at least 8 s) gives the pace. Then faults come, one every 5 s on average
(soak_faults.py). At the end all is healed, the run is stopped, and all that was recorded is checked: one digest a
version; every value explained by the journal's decisions (tests/support/quadratic_oracle.py); no process and no
descriptor left over; never more than dead_s + 5 s without a round. The last line is one JSON object; exit 1 if
anything of this does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))
sys.path.insert(0, str(HERE))

from atoll.events import read_events  # noqa: E402
from atoll.membership.journal import JournalFile  # noqa: E402
from atoll.membership.steps import VerdictMade  # noqa: E402
from soak_faults import CENTERS, NAMES, Chance, Fault  # noqa: E402
from soak_losses import by_kind, lost_after, noticed_after, pace_in, progress  # noqa: E402
from support.quadratic_oracle import Commit, Seen, wrong_values  # noqa: E402
from support.swarm import Swarm, nursery  # noqa: E402

PEERS = 6
STEP_S, INNER_STEPS = 0.1, 5
DEAD_S = 1.0
HANG_S = DEAD_S + 5.0
SHORT = {
    "heartbeat_s": 0.2,
    "dead_s": DEAD_S,
    "attempt_s": 4.0,
    "vote_s": 3.0,
    "connect_s": 2.0,
    "ready_wait_s": 5.0,
    "freeze_s": 2.0,
    "coordinator_lost_s": 60.0,
    "quorum_wait_s": 60.0,
    "progress_timeout_s": 3.0,
    "norm_limit": 1e9,  # the centers are meant to be far apart
}
SETTLE_S, END_S = 30.0, 20.0
MARK = "SOAK_RUN"
"""In the environment of everything that is started here, so that nothing can be left over unseen."""


class Soak:
    """One soak in one folder. Call `run` once; `report` tells what came out."""

    def __init__(self, folder: Path, seed: int, seconds: float, every_s: float) -> None:
        self.folder, self.seed, self.seconds, self.every_s = folder, seed, seconds, every_s
        self.quiet_s = max(8.0, 0.15 * seconds)
        self.hangs: list[str] = []
        self.ended_alone: list[str] = []
        self.leaked_descriptors = 0
        self.left_processes: list[str] = []
        self.faults: list[Fault] = []
        self._began_s = time.monotonic()

    def run(self) -> dict[str, Any]:
        with Swarm(self.folder, start_peers=PEERS, **SHORT) as swarm:
            self._swarm = swarm
            chance = Chance(swarm, random.Random(self.seed), self.every_s, self._start, self._say)
            for name in NAMES[:PEERS]:
                self._start(name)
            swarm.wait(lambda: self._num_rounds() >= 3, within_s=90, what="the first rounds")
            at_first = self._descriptors(PEERS)
            quiet = self._watch(self.quiet_s, chance.notice_ends)
            chance.faults.clear()
            noisy = self._watch(self.seconds - self.quiet_s, chance.tick)
            chance.heal_all()
            self._settle(chance)
            self.leaked_descriptors = self._descriptors(len(chance.running())) - at_first
            self._stop(chance)
            self.faults, self.ended_alone = chance.faults, chance.ended_alone
        return self._report(quiet, noisy)

    # ---- while it runs -----------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        self._swarm.quadratic(name, CENTERS[name], "--rounds", 1_000_000, "--step-s", STEP_S)

    def _watch(self, seconds: float, act: Callable[[], None]) -> tuple[float, float]:
        """Act again and again for so long, and see that rounds go on. Returns begin and end, in Unix seconds.

        While the coordinator is down nothing can go on, and how long its process takes to start is the machine's
        affair.
        """
        begin, rounds, moved_s = time.time(), self._num_rounds(), time.monotonic()
        while time.time() < begin + seconds:
            act()
            time.sleep(0.02)
            if not self._swarm.coordinator_listens():
                moved_s = time.monotonic()
            elif (now := self._num_rounds()) != rounds:
                rounds, moved_s = now, time.monotonic()
            elif time.monotonic() - moved_s > HANG_S:
                self._hang(f"no round for {HANG_S:g} s after round {rounds}")
                moved_s = time.monotonic()
        return begin, time.time()

    def _settle(self, chance: Chance) -> None:
        """All that run are members again."""
        deadline_s = time.monotonic() + SETTLE_S
        while chance.members() != chance.running():
            if time.monotonic() > deadline_s:
                missing = sorted(chance.running() - chance.members())
                return self._hang(f"{', '.join(missing)} no member {SETTLE_S:g} s after the last fault")
            chance.notice_ends()
            time.sleep(0.05)
        rounds = self._num_rounds()
        self._swarm.wait(lambda: self._num_rounds() >= rounds + 2, within_s=SETTLE_S, what="two calm rounds")
        return None

    def _hang(self, what: str) -> None:
        self.hangs.append(what)
        self._say(f"HANG: {what}")
        self._say(self._swarm.logs())

    def _descriptors(self, connected: int) -> int:
        """Of the coordinator, without one for each of its peers."""
        return len(os.listdir(f"/proc/{self._swarm.coordinator.pid}/fd")) - connected

    def _stop(self, chance: Chance) -> None:
        """End the run as an operator would; whatever is there afterwards was left over."""
        ordered = self._swarm.order("stop", "--reason", "the soak is over")
        if ordered.returncode:
            self._hang(f"atoll stop: exit {ordered.returncode}: {ordered.stderr.strip()}")
        deadline_s = time.monotonic() + END_S
        while marked_processes() and time.monotonic() < deadline_s:
            chance.running()  # reaps
            self._swarm.coordinator.poll()
            time.sleep(0.05)
        self.left_processes = marked_processes()

    def _num_rounds(self) -> int:
        return len(self._swarm.events("RoundCommitted")) + len(self._swarm.events("RoundSkipped"))

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began_s:6.1f} s  {text}", flush=True)

    # ---- afterwards --------------------------------------------------------------------------------------

    def _report(self, quiet: tuple[float, float], noisy: tuple[float, float]) -> dict[str, Any]:
        commits_s = self._times("RoundCommitted")
        pace = pace_in(commits_s, *quiet)
        expected = pace * (noisy[1] - noisy[0])
        rounds = progress(commits_s, noisy[1]) - progress(commits_s, noisy[0])
        forks, wrong = self._forks(), self._wrong_values()
        lost = lost_after(self.faults, commits_s, pace, noisy[1])
        costly = self._costly(lost, pace)
        for sentence in costly:
            self._say(sentence)
        for sentence in [*forks, *wrong, *self.hangs, *self.left_processes]:
            self._say(sentence.splitlines()[0])
        return {
            "rounds": round(rounds, 1),
            "rounds_fault_free": round(expected, 1),
            "kept": round(rounds / expected, 3),
            "round_s": round(1 / pace, 3),
            "faults": dict(Counter(fault.kind for fault in self.faults)),
            "rounds_lost": by_kind(lost, statistics.fmean),
            "rounds_lost_worst": by_kind(lost, max),
            "costly": len(costly),
            "wrong_sums": len(wrong),
            "forks": len(forks),
            "hangs": len(self.hangs),
            "ended_alone": len(self.ended_alone),
            "left_processes": len(self.left_processes),
            "leaked_descriptors": self.leaked_descriptors,
            "seed": self.seed,
        }

    def _costly(self, lost: Sequence[tuple[Fault, float]], pace: float) -> list[str]:
        """Faults that cost more rounds than pass until they are noticed, and one."""
        listening_s = self._times("CoordinatorListening")
        found = []
        for fault, rounds in lost:
            noticed_s = noticed_after(fault, self.faults, SHORT["heartbeat_s"], DEAD_S, listening_s)
            if rounds > noticed_s * pace + 1:
                found.append(
                    f"{fault.kind} {fault.peer} cost {rounds:.2f} rounds: noticed after {noticed_s:.1f} s"
                )
        return found

    def _times(self, kind: str) -> list[float]:
        """When the coordinator told of it, in Unix seconds."""
        told = read_events(self.folder / self._swarm.run / "coordinator.jsonl")
        return [line.wall_time_s for _, line, _ in told if line.event["type"] == kind]

    def _forks(self) -> list[str]:
        """Versions with more than one digest, over all that any peer recorded."""
        found = self._swarm.digests_by_version()
        for name in self._swarm.peers:
            for event in self._swarm.events("RoundApplied", name):
                found.setdefault(event["version"], set()).add(event["digest"])
        return [f"version {version} has digests {some}" for version, some in found.items() if len(some) > 1]

    def _wrong_values(self) -> list[str]:
        steps = {
            (event["version"], name): event["inner_steps"]
            for name in self._swarm.peers
            for event in self._swarm.events("RoundApplied", name)
        }
        seen = [
            Seen(row["version"], name, row["theta"])
            for name, peer in self._swarm.peers.items()
            for row in peer.rounds()
        ]
        commits = self._commits()
        return [*wrong_values(commits, CENTERS, steps, seen), *self._contradictions(commits)]

    def _commits(self) -> list[Commit]:
        """The journal's: an event may be missing where the coordinator was killed between the two."""
        journal = JournalFile(self._swarm.journal, self._swarm.run)
        try:
            verdicts = [record.verdict for record in journal.records if isinstance(record, VerdictMade)]
        finally:
            journal.close()
        return [
            Commit(verdict.version, {each.peer: each.weight for each in verdict.contributions})
            for verdict in verdicts
            if verdict.outcome == "committed"
        ]

    def _contradictions(self, commits: Sequence[Commit]) -> list[str]:
        """Events that tell of other contributors than the journal."""
        decided = {commit.version: dict(commit.weights) for commit in commits}
        told = [
            (event["version"], dict(zip(event["contributors"], event["weights"], strict=True)))
            for event in self._swarm.events("RoundCommitted")
        ]
        return [
            f"version {version}: the event says {weights}, the journal {decided.get(version)}"
            for version, weights in told
            if decided.get(version) != weights
        ]


def marked_processes() -> list[str]:
    """Everything that still runs with this soak's mark in its environment, but this process and the nursery."""
    found, ours = [], {os.getpid(), nursery().pid}
    for process in psutil.process_iter(["pid"]):
        try:
            marked = process.environ().get(MARK) == os.environ[MARK] and process.pid not in ours
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"left over: pid {process.pid}: {' '.join(process.cmdline())}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, printed")
    parser.add_argument("--every-s", type=float, default=5.0, help="mean time between two faults")
    parser.add_argument("--keep", type=Path, default=None, help="folder for logs and events; must not exist")
    args = parser.parse_args()
    seed = random.randrange(1_000_000) if args.seed is None else args.seed
    os.environ[MARK] = f"{os.getpid()}-{time.time_ns()}"
    print(f"soak: {args.seconds:g} s, seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="atoll-soak-") as scratch:
        folder = args.keep or Path(scratch)
        if args.keep:
            folder.mkdir(parents=True)
        report = Soak(folder, seed, args.seconds, args.every_s).run()
    print(json.dumps(report), flush=True)
    bad = ("wrong_sums", "forks", "hangs", "ended_alone", "left_processes")
    return int(any(report[name] for name in bad) or report["leaked_descriptors"] > 0)


if __name__ == "__main__":
    sys.exit(main())
