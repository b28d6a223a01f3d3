"""A new attempt sends only what is not there yet, and never uses what does not belong to it.

Bytes are counted at the sockets. Contributions are distinct powers of two: a sum tells whose they are.
"""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from atoll.plan.grid import Grid
from atoll.values import Contribution, Lane, OpId, Plan, ReduceReport
from support.engines import Engines, Running, decoded, encoded, power_of
from support.trees import ring_lanes

NUMEL = 2_000_000
GRID = Grid.of([NUMEL])
PEERS = {f"p{i}": np.full(NUMEL, power_of(i), np.float32) for i in range(4)}
HEADERS = 40_000
"""More than an attempt's headers, begins and acks take; far less than a chunk."""


def with_digests(plan: Plan, changed: str = "") -> Plan:
    return replace(
        plan,
        chunk_bytes=1 << 16,
        contributions=tuple(
            Contribution(c.peer, c.weight, f"{c.peer}'s update" + ("!" if c.peer == changed else ""))
            for c in plan.contributions
        ),
    )


class Swarm:
    """Engines whose buffers stay the same over the attempts of a round, as a peer's do."""

    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        self.results = {peer: np.zeros(GRID.wire_bytes("fp32"), np.uint8) for peer in PEERS}

    def attempt(self, plan: Plan, values: dict[str, np.ndarray] | None = None) -> dict[str, ReduceReport]:
        contributors = {contribution.peer for contribution in plan.contributions}
        running = {
            peer: Running(
                self.engines.comms[peer],
                plan,
                GRID,
                encoded(GRID, "fp32", (values or PEERS)[peer]) if peer in contributors else None,
                self.results[peer],
            )
            for peer in plan.members
        }
        return {peer: one.report() for peer, one in running.items()}

    def check(self, plan: Plan, reports: dict[str, ReduceReport], *indices: int) -> None:
        expected = np.float32(sum(power_of(i) for i in indices) / len(indices))
        for peer in plan.members:
            assert reports[peer].ok, reports[peer].reason
            np.testing.assert_array_equal(decoded(GRID, "fp32", self.results[peer]), expected)


def test_under_an_unchanged_set_nothing_is_sent_twice() -> None:
    with Engines(PEERS) as engines:
        swarm = Swarm(engines)
        plan = with_digests(engines.plan(GRID, "fp32", OpId(1, 0)))
        swarm.check(plan, swarm.attempt(plan), 0, 1, 2, 3)
        again = replace(plan, op=OpId(1, 0, attempt=1))
        reports = swarm.attempt(again)
        swarm.check(again, reports, 0, 1, 2, 3)
        assert all(report.stats.sent_bytes < HEADERS for report in reports.values())


def test_without_a_lost_peer_roots_sum_what_they_have_anew() -> None:
    """p3 is gone after everything came: its share has to be sent to the others, and the results, nothing else."""
    with Engines(PEERS) as engines:
        swarm = Swarm(engines)
        plan = with_digests(engines.plan(GRID, "fp32", OpId(1, 0)))
        swarm.check(plan, swarm.attempt(plan), 0, 1, 2, 3)
        members = ("p0", "p1", "p2")
        # What the planner does: everybody keeps its quarter, p3's is cut in three.
        lanes = tuple(Lane(peer, 3) for peer in members) + tuple(Lane(peer, 1) for peer in members)
        fewer = replace(
            plan, op=OpId(1, 0, attempt=1), members=members, contributions=plan.contributions[:3], lanes=lanes
        )
        reports = swarm.attempt(fewer)
        swarm.check(fewer, reports, 0, 1, 2)
        volume = GRID.wire_bytes("fp32")
        quarter_to_two_roots, result_to_two = volume / 4 * 2 / 3, volume / 3 * 2
        for report in reports.values():
            assert report.stats.sent_bytes == pytest.approx(quarter_to_two_roots + result_to_two, rel=0.02)


def test_a_changed_contribution_is_sent_again() -> None:
    """The same peer with other bytes, as after a restart: what roots hold of the old ones counts for nothing."""
    with Engines(PEERS) as engines:
        swarm = Swarm(engines)
        plan = with_digests(engines.plan(GRID, "fp32", OpId(1, 0)))
        swarm.attempt(plan)
        again = with_digests(replace(plan, op=OpId(2, 0, attempt=1)), changed="p1")
        values = {**PEERS, "p1": np.full(NUMEL, power_of(7), np.float32)}
        reports = swarm.attempt(again, values)
        swarm.check(again, reports, 0, 7, 2, 3)


def test_without_digests_nothing_is_reused() -> None:
    with Engines(PEERS) as engines:
        swarm = Swarm(engines)
        plan = replace(engines.plan(GRID, "fp32", OpId(1, 0)), chunk_bytes=1 << 16)
        swarm.attempt(plan)
        values = {**PEERS, "p2": np.full(NUMEL, power_of(9), np.float32)}
        again = replace(plan, op=OpId(1, 0, attempt=1))
        swarm.check(again, swarm.attempt(again, values), 0, 1, 9, 3)


def test_other_weights_give_another_mean_from_the_same_contributions() -> None:
    with Engines(PEERS) as engines:
        swarm = Swarm(engines)
        plan = with_digests(engines.plan(GRID, "fp32", OpId(1, 0)))
        swarm.attempt(plan)
        heavier = tuple(replace(c, weight=5) if c.peer == "p3" else c for c in plan.contributions)
        again = replace(plan, op=OpId(1, 0, attempt=1), contributions=heavier)
        reports = swarm.attempt(again)
        for peer in plan.members:
            assert reports[peer].ok
            np.testing.assert_array_equal(
                decoded(GRID, "fp32", swarm.results[peer]), np.float32((1 + 2 + 4 + 5 * 8) / 8)
            )
            # The finished chunks are new; the contributions were there.
            assert reports[peer].stats.sent_bytes == pytest.approx(GRID.wire_bytes("fp32") / 4 * 3, rel=0.02)


def test_a_scribbled_result_is_not_taken_for_a_finished_one() -> None:
    with Engines(PEERS) as engines:
        swarm = Swarm(engines)
        plan = with_digests(engines.plan(GRID, "fp32", OpId(1, 0)))
        swarm.attempt(plan)
        for result in swarm.results.values():
            result[:] = 7
        again = replace(plan, op=OpId(1, 0, attempt=1))
        swarm.check(again, swarm.attempt(again), 0, 1, 2, 3)


def test_an_aborted_attempt_leaves_what_it_brought() -> None:
    """p3 never begins: the others move all that does not need it, and only the rest is sent when it comes."""
    with Engines(PEERS) as engines:
        swarm = Swarm(engines)
        plan = with_digests(engines.plan(GRID, "fp32", OpId(1, 0), deadline_s=1.0))
        running = [
            Running(engines.comms[peer], plan, GRID, encoded(GRID, "fp32", PEERS[peer]), swarm.results[peer])
            for peer in ("p0", "p1", "p2")
        ]
        reports = [one.report() for one in running]
        assert not any(report.ok for report in reports)
        again = replace(plan, op=OpId(1, 0, attempt=1), deadline_s=20.0)
        second = swarm.attempt(again)
        swarm.check(again, second, 0, 1, 2, 3)
        once = 2 * GRID.wire_bytes("fp32") * 3 / 4
        for peer, first in zip(("p0", "p1", "p2"), reports, strict=True):
            assert first.stats.sent_bytes > HEADERS
            total = first.stats.sent_bytes + second[peer].stats.sent_bytes
            assert total == pytest.approx(once, rel=0.03)


def test_partial_sums_of_a_ring_are_kept_too() -> None:
    with Engines(PEERS) as engines:
        swarm = Swarm(engines)
        plan = with_digests(engines.plan(GRID, "fp32", OpId(1, 0)))
        plan = replace(plan, lanes=ring_lanes(plan.members))
        swarm.check(plan, swarm.attempt(plan), 0, 1, 2, 3)
        again = replace(plan, op=OpId(1, 0, attempt=1))
        reports = swarm.attempt(again)
        swarm.check(again, reports, 0, 1, 2, 3)
        assert all(report.stats.sent_bytes < HEADERS for report in reports.values())


def test_the_next_round_starts_from_nothing() -> None:
    with Engines(PEERS) as engines:
        swarm = Swarm(engines)
        plan = with_digests(engines.plan(GRID, "fp32", OpId(1, 0)))
        swarm.attempt(plan)
        following = replace(plan, op=OpId(1, 1))
        reports = swarm.attempt(following)
        swarm.check(following, reports, 0, 1, 2, 3)
        assert all(
            report.stats.sent_bytes == pytest.approx(2 * GRID.wire_bytes("fp32") * 3 / 4, rel=0.02)
            for report in reports.values()
        )
