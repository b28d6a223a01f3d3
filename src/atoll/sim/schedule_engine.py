"""A virtual engine: attempts at a reduction among virtual peers, with links that break and peers that vanish.

A result is told as the list of who is in it with which weight and update; its text is its digest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.plan.shapes import used_links
from atoll.values import Edge, OpId, Plan, ReduceReport

if TYPE_CHECKING:
    from atoll.sim.schedule_peer import VirtualPeer
    from atoll.sim.schedule_world import World


class Reduction:
    """One attempt: who began it with which plan, and who has ended it."""

    def __init__(self) -> None:
        self.begun: dict[str, tuple[VirtualPeer, Plan]] = {}
        self.ended: set[str] = set()


class VirtualEngine:
    def __init__(self, world: World) -> None:
        self._world = world
        self._reductions: dict[OpId, Reduction] = {}
        self.cut: set[frozenset[str]] = set()
        self.wrong_results = 0

    def begin(self, peer: VirtualPeer, plan: Plan) -> None:
        reduction = self._reductions.setdefault(plan.op, Reduction())
        reduction.begun[peer.peer] = (peer, plan)
        self._world.after(plan.deadline_s, peer, lambda: self._deadline(peer, plan))
        if all(name in reduction.begun for name in plan.members):
            for other, other_plan in reduction.begun.values():
                self._later(other, other_plan)

    def _later(self, peer: VirtualPeer, plan: Plan) -> None:
        self._world.after(self._world.rng.uniform(0.05, 0.6), peer, lambda: self._finish(peer, plan))

    def abort(self, peer: VirtualPeer, op: OpId) -> None:
        self._world.after(0.05, peer, lambda: self._report(peer, op, ReduceReport(False, "aborted")))

    def gone(self, peer: VirtualPeer) -> None:
        """A process ended: whoever still reduces with it sees the broken link soon."""
        for op, reduction in self._reductions.items():
            begun = reduction.begun.get(peer.peer)
            if begun is None or begun[0] is not peer or peer.peer in reduction.ended:
                continue
            reduction.ended.add(peer.peer)
            for other, _ in reduction.begun.values():
                if other.peer not in reduction.ended:
                    edges = (Edge(peer.peer, other.peer),)
                    report = ReduceReport(False, f"the link to {peer.peer} broke", edges)
                    self._world.after(
                        0.2, other, lambda other=other, op=op, report=report: self._report(other, op, report)
                    )

    def _finish(self, peer: VirtualPeer, plan: Plan) -> None:
        """All have begun and some time has passed: mostly the result is there."""
        world, reduction = self._world, self._reductions[plan.op]
        if peer.peer in reduction.ended:
            return
        broken = self._broken(peer, plan)
        if broken:
            self._report(peer, plan.op, ReduceReport(False, "a link broke", broken))
            return
        others = [reduction.begun[name][0] for name in plan.members]
        frozen = any(other.frozen_until_s > world.now_s for other in others)
        if frozen and world.rng.random() < 0.5:
            self._later(peer, plan)
            return
        self._report(peer, plan.op, ReduceReport(True, "done"), self._result(plan))

    def _broken(self, peer: VirtualPeer, plan: Plan) -> tuple[Edge, ...]:
        """Cut links that this peer uses in the plan's lanes."""
        if not self.cut:
            return ()
        mine = (
            edge for edge in used_links(plan.lanes, plan.members) if peer.peer in (edge.source, edge.target)
        )
        return tuple(sorted(edge for edge in mine if frozenset((edge.source, edge.target)) in self.cut))

    def _result(self, plan: Plan) -> str:
        result = "+".join(f"{each.weight}{each.peer}" for each in plan.contributions)
        if self.wrong_results > 0:
            self.wrong_results -= 1
            return f"{result}?"
        return result

    def _deadline(self, peer: VirtualPeer, plan: Plan) -> None:
        missing = [name for name in plan.members if name not in self._reductions[plan.op].begun]
        edges = tuple(Edge(name, peer.peer) for name in missing if self._world.rng.random() < 0.5)
        self._report(peer, plan.op, ReduceReport(False, "deadline", edges))

    def _report(self, peer: VirtualPeer, op: OpId, report: ReduceReport, digest: str = "") -> None:
        reduction = self._reductions.get(op)
        if reduction is None or peer.peer in reduction.ended or peer.ended:
            return
        reduction.ended.add(peer.peer)
        peer.reduced(op, report, digest)
