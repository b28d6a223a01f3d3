"""The invariants of broken links, checked while a schedule runs: which lanes may go over a link that failed."""

from __future__ import annotations

from collections.abc import Callable

from atoll.membership.coordinator_state import CoordinatorState
from atoll.membership.messages import Vote
from atoll.membership.steps import CoordinatorEvent, PeerSaid, Step
from atoll.plan.shapes import avoids
from atoll.values import Edge


def joined(members: tuple[str, ...], broken: set[Edge]) -> bool:
    """Whether all members reach each other over pairs that are not broken, through others if need be."""
    pairs = {frozenset((edge.source, edge.target)) for edge in broken}
    reached, new = {members[0]}, [members[0]]
    while new:
        one = new.pop()
        more = {other for other in members if frozenset((one, other)) not in pairs} - reached
        reached |= more
        new += more
    return reached == set(members)


class LinkHistory:
    """The links that members named as broken, round by round, in one term. `require` raises for what must not be."""

    def __init__(self, require: Callable[[bool, str], None]) -> None:
        self._require = require
        self._broken: dict[int, set[Edge]] = {}
        self._forgiven: set[int] = set()

    def check_step(
        self, before: CoordinatorState, event: CoordinatorEvent, step: Step[CoordinatorState]
    ) -> None:
        """No lane uses a link that a member named as broken in this round; only if the members cannot be joined
        without such links, they are all tried once more.
        """
        old, new = before.round.attempt, step.state.round.attempt
        match event:
            case PeerSaid(peer=peer, incarnation=incarnation, message=Vote() as vote) if (
                old is not None and vote.op == old.plan.op and old.incarnations.get(peer) == incarnation
            ):
                self._broken.setdefault(vote.op.round, set()).update(vote.broken)
        if new is None or (old is not None and old.plan.op == new.plan.op):
            return
        plan, broken = new.plan, self._broken.get(new.plan.op.round, set())
        if avoids(plan.lanes, plan.members, broken):
            return
        forgiven = plan.op.round not in self._forgiven and not joined(plan.members, broken)
        self._require(
            forgiven, f"{plan.op} has a lane over a link that broke in this round: {sorted(broken)}"
        )
        self._forgiven.add(plan.op.round)
        broken.clear()

    def forget(self) -> None:
        """Another coordinator knows of no broken link."""
        self._broken.clear()
        self._forgiven.clear()
