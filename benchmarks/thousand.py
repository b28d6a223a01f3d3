"""What a round costs the coordinator's machine with a thousand peers that come and go: CPU, no network, no weights.

python benchmarks/thousand.py [--peers 1000] [--rounds 8] [--churn 10] [--seed 0]

Every round some peers are killed (their connections close) and as many new ones join, at random moments among
everybody's heartbeats, readies, votes and reports; every message and every half heartbeat is a step of the real machine
with the real planner. Printed per round: `decide`, the CPU of the steps that plan the attempt and commit it, and
`all`, that of all steps from the first ready to the last report, with the number of them. One JSON line comes last.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator

from atoll.membership import coordinator
from atoll.membership.coordinator import CoordinatorState
from atoll.membership.messages import Applied, CaughtUp, Declare, Heartbeat, PeerMessage, Ready, Vote
from atoll.membership.settings import CoordinatorSettings
from atoll.membership.steps import CoordinatorEvent, PeerArrived, PeerDropped, PeerSaid, Tick
from atoll.plan.planner import choose
from atoll.values import LinkRate, ParameterInfo, Range, RankInfo, TransferStats

LAYOUT = (ParameterInfo("w", (1 << 20,), "float32"),)
SETTINGS = {"outer.weights": "tokens", "outer.codec": "int8"}
RANKS = (RankInfo("10.0.0.1", 7000, (Range(0, 1 << 20),), sidecar_port=7001),)


class Crowd:
    """The peers, as one script of messages; and the machine, timed step by step."""

    def __init__(self, num_peers: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.state: CoordinatorState
        settings = CoordinatorSettings(run="thousand", start_peers=num_peers)
        self.now_s = 100.0
        self.state = coordinator.start(settings, (), b"key", dict(SETTINGS), self.now_s).state
        self.incarnations: dict[str, str] = {}
        self.names = (f"p{number:05d}" for number in range(10**5))
        self.cpu_s, self.decide_s, self.num_steps = 0.0, 0.0, 0
        for name in [next(self.names) for _ in range(num_peers)]:
            self.arrive(name)
            self.said(name, self._declaration())

    # ---- the machine -----------------------------------------------------------------------------------------

    def hear(self, event: CoordinatorEvent) -> None:
        self.now_s += 1e-4
        before, begin_s = self.state, time.process_time()
        step = coordinator.step(before, event, self.now_s, make_lanes=choose)
        took_s = time.process_time() - begin_s
        self.state, self.last = step.state, step.reason
        self.cpu_s += took_s
        self.num_steps += 1
        if (before.version, before.round.attempts) != (self.state.version, self.state.round.attempts):
            self.decide_s += took_s

    def said(self, peer: str, message: PeerMessage) -> None:
        self.hear(PeerSaid(peer, self.incarnations[peer], message))

    def arrive(self, peer: str) -> None:
        self.incarnations[peer] = "1"
        self.hear(PeerArrived(peer, "1", "10.0.0.1"))

    # ---- the peers -------------------------------------------------------------------------------------------

    def _declaration(self) -> Declare:
        return Declare(LAYOUT, SETTINGS, RANKS, 0, 0, "d0", 0)

    def members(self) -> list[str]:
        return [record.peer for record in self.state.members()]

    def join(self, peer: str) -> None:
        self.arrive(peer)
        self.said(peer, self._declaration())
        self.catch_up(peer)

    def catch_up(self, peer: str) -> None:
        version, last = self.state.version, self.state.round.number - 1
        self.said(peer, CaughtUp(version, last, f"d{version}", version))

    def round(self, churn: int) -> None:
        """One round, from the first ready to the last report of what was applied."""
        number, version = self.state.round.number, self.state.version
        newcomers = [next(self.names) for _ in range(churn)]
        gone = set(self.rng.sample(self.members(), churn))
        self._in_any_order(self._readies(number, version, gone))
        for peer in sorted(gone):
            self.hear(PeerDropped(peer, self.incarnations[peer]))
        for peer in newcomers:
            self.arrive(peer)
            self.said(peer, self._declaration())
        self._until(lambda: not gone & set(self.members()))
        self._in_any_order(self._votes())
        self._in_any_order(self._reports())
        for peer in newcomers:
            if self.state.peers[peer].catching_up is not None:
                self.catch_up(peer)
        assert self.state.version == version + 1, "every round is committed"
        assert set(newcomers) <= set(self.members()), "who came is a member"

    def _in_any_order(self, messages: Iterator[tuple[str, PeerMessage]]) -> None:
        events = list(messages)
        self.rng.shuffle(events)
        for index, (peer, message) in enumerate(events):
            self.said(peer, message)
            if index % 50 == 0:
                self.hear(Tick())

    def _readies(self, number: int, version: int, gone: set[str]) -> Iterator[tuple[str, PeerMessage]]:
        for peer in self.members():
            if peer not in gone:
                yield peer, Heartbeat(10 * number, "local", 9, 10)
                ready = Ready(number, version, f"d{version}", 100, 10, self.rng.uniform(0.9, 1.1), True)
                yield peer, ready

    def _votes(self) -> Iterator[tuple[str, PeerMessage]]:
        attempt = self.state.round.attempt
        assert attempt is not None, f"all are ready: {self.last}"
        for peer in attempt.plan.members:
            lines = [
                LinkRate(*ends, 1e7 * self.rng.uniform(0.5, 2), 0.1) for ends in ((peer, ""), ("", peer))
            ]
            yield peer, Vote(attempt.plan.op, True, "result", (), "", TransferStats(links=tuple(lines)))

    def _reports(self) -> Iterator[tuple[str, PeerMessage]]:
        version = self.state.version
        commit = self.state.commit
        assert commit is not None
        for peer in commit.members:
            yield peer, Applied(version, f"d{version}")

    def _until(self, holds) -> None:  # type: ignore[no-untyped-def]
        """Time passes, everybody's heart beats."""
        for _ in range(8):
            if holds():
                return
            self.now_s += 0.5
            self.hear(Tick())
        raise AssertionError("who was killed is still a member")


def measure(num_peers: int, rounds: int, churn: int, seed: int) -> dict[str, float]:
    crowd = Crowd(num_peers, seed)
    decides, alls, steps = [], [], []
    for number in range(rounds + 1):
        crowd.cpu_s, crowd.decide_s, crowd.num_steps = 0.0, 0.0, 0
        crowd.round(churn if number else 0)  # who comes before anything is committed takes part at once
        if number:
            decides.append(1e3 * crowd.decide_s)
            alls.append(1e3 * crowd.cpu_s)
            steps.append(crowd.num_steps)
    return {
        "peers": num_peers,
        "churn": churn,
        "rounds": rounds,
        "decide_ms": round(statistics.median(decides), 1),
        "all_ms": round(statistics.median(alls), 1),
        "steps": round(statistics.median(steps)),
        "us_a_step": round(1e3 * statistics.median(alls) / statistics.median(steps), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--churn", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = measure(options.peers, options.rounds, options.churn, options.seed)
    print(
        f"{found['peers']:.0f} peers, {found['churn']:.0f} killed and as many new every round: a round is decided in "
        f"{found['decide_ms']} ms of CPU; all its {found['steps']:.0f} steps take {found['all_ms']} ms"
    )
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
