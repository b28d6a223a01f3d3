"""Planted bugs of those who lease data: each must be found by one invariant (`schedule_data.SlotHistory`)."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from atoll.membership import coordinator
from atoll.membership.coordinator_state import CoordinatorState
from atoll.membership.leases import Lease
from atoll.membership.messages import Ready, SlotsWanted
from atoll.membership.steps import (
    CoordinatorEvent,
    Journal,
    LeasesChanged,
    PeerSaid,
    VerdictMade,
)
from atoll.sim.schedule_machines import CoordinatorStep, Machines, acts_wrongly, hears_wrongly


def reads_forgotten(state: CoordinatorState, event: CoordinatorEvent) -> CoordinatorEvent:
    """What a contributor read is not committed."""
    match event:
        case PeerSaid(message=Ready() as ready):
            return replace(event, message=replace(ready, reads=ready.reads[1:]))
    return event


def leased_unsaid(step: CoordinatorStep) -> CoordinatorStep:
    """What is leased within a round is not journaled."""
    said = tuple(
        each
        for each in step.effects
        if not (isinstance(each, Journal) and isinstance(each.record, LeasesChanged))
    )
    return replace(step, effects=said)


def _leased_twice() -> Machines:
    """Who runs dry gets what another one holds."""

    def step(state: CoordinatorState, event: CoordinatorEvent, now_s: float, **how: Any) -> CoordinatorStep:
        match event:
            case PeerSaid(peer=peer, message=SlotsWanted()) if state.slots is not None:
                others = [held for other, held in state.slots.leases.items() if other != peer]
                if others:
                    leases = {**state.slots.leases, peer: (*state.slots.held(peer), others[0][0])}
                    state = replace(state, slots=replace(state.slots, leases=leases))
        return coordinator.step(state, event, now_s, **how)

    return Machines(coordinator_step=step)


def _all_reads_count() -> Machines:
    """Nobody looks whether a peer holds what it read."""

    def step(state: CoordinatorState, event: CoordinatorEvent, now_s: float, **how: Any) -> CoordinatorStep:
        match event:
            case PeerSaid(peer=peer, message=Ready(reads=reads)) if state.slots is not None:
                read = tuple(Lease(each.slot, *each.start) for each in reads)
                held = {**state.slots.leases, peer: read}
                state = replace(state, slots=replace(state.slots, leases=held))
        return coordinator.step(state, event, now_s, **how)

    return Machines(coordinator_step=step)


def _gone_keep_slots() -> Machines:
    """What a peer held that is gone does not come back."""

    def step(state: CoordinatorState, event: CoordinatorEvent, now_s: float, **how: Any) -> CoordinatorStep:
        after = coordinator.step(state, event, now_s, **how)
        changes = [each for each in after.effects if isinstance(each, Journal)]
        returns = [
            each for each in changes if isinstance(each.record, LeasesChanged) and each.record.returned
        ]
        if not returns or any(isinstance(each.record, VerdictMade) for each in changes):
            return after
        kept = tuple(each for each in after.effects if each not in returns)
        return replace(after, state=replace(after.state, slots=state.slots), effects=kept)

    return Machines(coordinator_step=step)


def _reads_of_the_absent_forgotten() -> Machines:
    """Who is away when its round is committed has read nothing."""

    def step(state: CoordinatorState, event: CoordinatorEvent, now_s: float, **how: Any) -> CoordinatorStep:
        attempt = state.round.attempt
        if attempt is not None:
            here = {
                peer: reads
                for peer, reads in attempt.reads.items()
                if peer in state.peers and state.peers[peer].connected
            }
            state = replace(state, round=replace(state.round, attempt=replace(attempt, reads=here)))
        return coordinator.step(state, event, now_s, **how)

    return Machines(coordinator_step=step)


DATA_BUGS: dict[str, Machines] = {
    "reads-forgotten": hears_wrongly(reads_forgotten),
    "all-reads-count": _all_reads_count(),
    "leased-twice": _leased_twice(),
    "leased-unsaid": acts_wrongly(leased_unsaid),
    "gone-keep-slots": _gone_keep_slots(),
    "reads-of-the-absent-forgotten": _reads_of_the_absent_forgotten(),
}
