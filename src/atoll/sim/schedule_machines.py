"""The machines that a schedule runs: the real ones, or the real ones with something put in their way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from atoll.membership import coordinator, member
from atoll.membership.coordinator_state import CoordinatorState
from atoll.membership.member import MemberState
from atoll.membership.messages import Verdict
from atoll.membership.steps import (
    CoordinatorEvent,
    Step,
)


def _rounds_before(known: int, verdict: Verdict) -> int:
    return verdict.op.round - 1


class Machines(msgspec.Struct, frozen=True):
    """The four functions that a schedule runs, and how a trainer counts.

    `rounds_before(known, verdict)` is how many rounds a trainer that knows of `known` counts as over when it
    obeys a verdict.
    """

    coordinator_start: Callable[..., Step[CoordinatorState]] = coordinator.start
    coordinator_step: Callable[..., Step[CoordinatorState]] = coordinator.step
    member_start: Callable[..., Step[MemberState]] = member.start
    member_step: Callable[..., Step[MemberState]] = member.step
    rounds_before: Callable[[int, Verdict], int] = _rounds_before


CoordinatorStep = Step[CoordinatorState]
ChangeEvent = Callable[[CoordinatorState, CoordinatorEvent], CoordinatorEvent]
ChangeStep = Callable[[CoordinatorStep], CoordinatorStep]


def hears_wrongly(change: ChangeEvent) -> Machines:
    """A coordinator that takes in other events than it gets."""

    def step(state: CoordinatorState, event: CoordinatorEvent, now_s: float, **how: Any) -> CoordinatorStep:
        return coordinator.step(state, change(state, event), now_s, **how)

    return Machines(coordinator_step=step)


def acts_wrongly(change: ChangeStep) -> Machines:
    """A coordinator that does something else than it decided."""

    def step(state: CoordinatorState, event: CoordinatorEvent, now_s: float, **how: Any) -> CoordinatorStep:
        return change(coordinator.step(state, event, now_s, **how))

    return Machines(coordinator_step=step)
