"""Planted bugs: each breaks one of the two machines, or the trainer, from outside; one invariant must find it.

A bug wraps the functions of the machines (`schedule_machines.Machines`); the machines themselves hold no switch for any
of them. Those of the data are in `schedule_data_bugs`.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from atoll.membership import coordinator, member
from atoll.membership.coordinator_state import CoordinatorState
from atoll.membership.member import MemberState, Phase
from atoll.membership.messages import Applied, Declare, Ready, Reduce, Verdict, Vote
from atoll.membership.steps import (
    CoordinatorEvent,
    CoordinatorSaid,
    Journal,
    MemberEvent,
    Order,
    PeerDropped,
    PeerSaid,
    Send,
    Step,
    TermRaised,
    Tick,
    VerdictMade,
)
from atoll.sim.schedule_data_bugs import DATA_BUGS
from atoll.sim.schedule_machines import CoordinatorStep, Machines, acts_wrongly, hears_wrongly
from atoll.values import PlanChoice, PlanRequest, TransferStats

# ---- the coordinator hears wrongly -----------------------------------------------------------------------


def stale_ready(state: CoordinatorState, event: CoordinatorEvent) -> CoordinatorEvent:
    match event:
        case PeerSaid(message=Ready() as ready):
            return replace(event, message=replace(ready, round=state.round.number, version=state.version))
    return event


def two_with_one_id(state: CoordinatorState, event: CoordinatorEvent) -> CoordinatorEvent:
    if isinstance(event, PeerSaid) and (record := state.peers.get(event.peer)):
        return replace(event, incarnation=record.incarnation)
    return event


def old_votes(state: CoordinatorState, event: CoordinatorEvent) -> CoordinatorEvent:
    match event:
        case PeerSaid(message=Vote() as vote) if state.round.attempt is not None:
            return replace(event, message=replace(vote, op=state.round.attempt.plan.op))
    return event


def idle_counts(state: CoordinatorState, event: CoordinatorEvent) -> CoordinatorEvent:
    match event:
        case PeerSaid(message=Ready(steps=0) as ready):
            return replace(event, message=replace(ready, steps=1, tokens=1))
    return event


def not_finite_counts(state: CoordinatorState, event: CoordinatorEvent) -> CoordinatorEvent:
    match event:
        case PeerSaid(message=Ready(finite=False) as ready):
            return replace(event, message=replace(ready, finite=True, norm=1.0))
    return event


def other_bits_planned(state: CoordinatorState, event: CoordinatorEvent) -> CoordinatorEvent:
    match event:
        case PeerSaid(message=(Ready() | Applied() | Declare()) as message):
            return replace(event, message=replace(message, digest="the same"))
    return event


def dead_forgotten(state: CoordinatorState, event: CoordinatorEvent) -> CoordinatorEvent:
    """Time never passes, and no connection ever closes."""
    if isinstance(event, Tick | PeerDropped):
        return PeerSaid("nobody", "", Applied(0, ""))
    return event


# ---- the coordinator acts wrongly ------------------------------------------------------------------------


def reused_op(step: CoordinatorStep) -> CoordinatorStep:
    attempt = step.state.round.attempt
    if attempt is not None and not attempt.failed:
        return step
    return replace(step, state=replace(step.state, round=replace(step.state.round, attempts=0)))


def verdict_before_journal(step: CoordinatorStep) -> CoordinatorStep:
    late = [
        each for each in step.effects if isinstance(each, Journal) and isinstance(each.record, VerdictMade)
    ]
    return replace(step, effects=(*(each for each in step.effects if each not in late), *late))


def different_sets(step: CoordinatorStep) -> CoordinatorStep:
    effects = list(step.effects)
    for index in reversed(range(len(effects))):
        match effects[index]:
            case Send(peer=peer, message=Reduce(plan=plan)) if len(plan.contributions) > 1:
                effects[index] = Send(peer, Reduce(replace(plan, contributions=plan.contributions[:-1])))
                break
    return replace(step, effects=tuple(effects))


def fences_forgotten(step: CoordinatorStep) -> CoordinatorStep:
    return replace(step, state=replace(step.state, gone=()))


def _missing_votes() -> Machines:
    """One yes is taken for everybody's."""

    def step(state: CoordinatorState, event: CoordinatorEvent, now_s: float, **how: Any) -> CoordinatorStep:
        match event:
            case PeerSaid(message=Vote(ok=True) as vote) if state.round.attempt is not None:
                attempt = state.round.attempt
                forged = {peer: replace(vote, stats=TransferStats()) for peer in attempt.plan.members}
                state = replace(state, round=replace(state.round, attempt=replace(attempt, votes=forged)))
                return coordinator.step(state, Tick(), now_s, **how)
        return coordinator.step(state, event, now_s, **how)

    return Machines(coordinator_step=step)


def _absent_votes() -> Machines:
    """Living members that did not vote yet are not waited for."""

    def step(state: CoordinatorState, event: CoordinatorEvent, now_s: float, **how: Any) -> CoordinatorStep:
        after = coordinator.step(state, event, now_s, **how)
        attempt = after.state.round.attempt
        match event:
            case PeerSaid(message=Vote(ok=True)) if attempt is not None and not attempt.failed:
                voted = {peer: each for peer, each in attempt.incarnations.items() if peer in attempt.votes}
                hurried = replace(
                    after.state,
                    round=replace(after.state.round, attempt=replace(attempt, incarnations=voted)),
                )
                more = coordinator.step(hurried, Tick(), now_s, **how)
                return replace(more, effects=(*after.effects, *more.effects))
        return after

    return Machines(coordinator_step=step)


def _old_term() -> Machines:
    """A restarted coordinator keeps its term."""

    def start(settings: Any, records: Any, *rest: Any) -> CoordinatorStep:
        begun = coordinator.start(settings, records, *rest)
        if not records:
            return begun
        term = begun.state.term - 1
        raised = Journal(TermRaised(term=term, session_key=begun.state.session_key))
        return Step(replace(begun.state, term=term), (raised,), begun.reason)

    return Machines(coordinator_start=start)


def _broken_links_planned() -> Machines:
    """The planner is not told which links broke."""

    def step(state: CoordinatorState, event: CoordinatorEvent, now_s: float, **how: Any) -> CoordinatorStep:
        def make_lanes(request: PlanRequest) -> PlanChoice:
            return how["make_lanes"](replace(request, broken=frozenset()))

        return coordinator.step(state, event, now_s, make_lanes=make_lanes)

    return Machines(coordinator_step=step)


def _below_quorum() -> Machines:
    def start(settings: Any, *rest: Any) -> CoordinatorStep:
        return coordinator.start(replace(settings, min_peers=1), *rest)

    return Machines(coordinator_start=start)


# ---- the member ------------------------------------------------------------------------------------------


def _unknown_verdict() -> Machines:
    """Cut off after a yes, a member takes its own vote for the verdict."""

    def step(state: MemberState, event: MemberEvent, now_s: float) -> Step[MemberState]:
        after = member.step(state, event, now_s)
        vote = after.state.vote
        if after.state.phase is not Phase.VOTED or after.state.connected or vote is None or not vote.ok:
            return after
        guess = Verdict(vote.op, "committed", state.version + 1, vote.digest, (), (), {}, "surely")
        return member.step(after.state, CoordinatorSaid(guess), now_s)

    return Machines(member_step=step)


def _verdict_twice() -> Machines:
    def step(state: MemberState, event: MemberEvent, now_s: float) -> Step[MemberState]:
        match event:
            case CoordinatorSaid(message=Verdict(outcome="committed") as verdict) if (
                state.phase is Phase.LOCAL and verdict.version == state.version
            ):
                return Step(
                    replace(state, phase=Phase.APPLYING, applying=verdict), (Order(verdict),), "once more"
                )
        return member.step(state, event, now_s)

    return Machines(member_step=step)


# ---- the trainer -----------------------------------------------------------------------------------------


def _skips_unheard() -> Machines:
    """Rounds that were skipped while it trained do not count."""
    return Machines(rounds_before=lambda known, verdict: known)


BUGS: dict[str, Machines] = {
    "reused-op": acts_wrongly(reused_op),
    "verdict-before-journal": acts_wrongly(verdict_before_journal),
    "unknown-verdict": _unknown_verdict(),
    "stale-ready": hears_wrongly(stale_ready),
    "two-with-one-id": hears_wrongly(two_with_one_id),
    "old-term": _old_term(),
    "old-votes": hears_wrongly(old_votes),
    "missing-votes": _missing_votes(),
    "absent-votes": _absent_votes(),
    "verdict-twice": _verdict_twice(),
    "fences-forgotten": acts_wrongly(fences_forgotten),
    "different-sets": acts_wrongly(different_sets),
    "idle-counts": hears_wrongly(idle_counts),
    "not-finite-counts": hears_wrongly(not_finite_counts),
    "other-bits-planned": hears_wrongly(other_bits_planned),
    "dead-forgotten": hears_wrongly(dead_forgotten),
    "broken-links-planned": _broken_links_planned(),
    "below-quorum": _below_quorum(),
    "skips-unheard": _skips_unheard(),
    **DATA_BUGS,
}
