"""The member machine, the other half: what the coordinator says, and what of it is obeyed or ignored, and why. Pure.

The world is not our own: an order may come late, twice, or after a newer one. Phase, op id, round and version in
`MemberState` say whether it still holds. A member's commit line is in `_hear_verdict`.
"""

from __future__ import annotations

from msgspec.structs import replace

from atoll.membership.leases import SlotTable
from atoll.membership.member_outcome import Outcome, declaration_of, fail, of_version, outcome, send
from atoll.membership.member_state import IN_ROUND, MemberState, Phase
from atoll.membership.messages import (
    Abort,
    AskToLeave,
    CatchUp,
    CoordinatorMessage,
    Ended,
    Freeze,
    HeartbeatAck,
    Leases,
    Probe,
    Reach,
    Reduce,
    Refused,
    Serve,
    Verdict,
    View,
    Vote,
)
from atoll.membership.steps import (
    AbortAttempt,
    Effect,
    MeasureLinks,
    Order,
    RequestFreeze,
    RequestLeave,
    Resume,
    ServeOthers,
    TellLeases,
)
from atoll.values import Plan, TransferStats

_NO_STATS = TransferStats()


def hear(state: MemberState, message: CoordinatorMessage) -> Outcome:
    match message:
        case HeartbeatAck():
            return outcome(state, "the coordinator lives")
        case View():
            return _hear_view(state, message)
        case CatchUp():
            return _hear_catch_up(state, message)
        case Serve(version=version, stage=stage):
            return outcome(state, "somebody catches up", ServeOthers(version, stage))
        case Probe():
            return _hear_probe(state, message)
        case Reach():
            return _hear_reach(state, message)
        case Freeze():
            return _hear_freeze(state, message)
        case Reduce(plan=plan):
            return _hear_plan(state, plan)
        case Abort():
            return _hear_abort(state, message)
        case Verdict():
            return _hear_verdict(state, message)
        case Leases():
            return _hear_leases(state, message)
        case AskToLeave(reason=reason):
            return outcome(state, reason, RequestLeave(reason))
        case Refused(reason=reason):
            return fail(state, "refused", reason)
        case Ended(kind=kind, reason=reason):
            return fail(state, kind, reason)
        case _:
            return outcome(state, f"ignored a {type(message).__name__} on a connection that is proven")


def _hear_view(state: MemberState, view: View) -> Outcome:
    """It lets a peer in that has declared, or caught up. A peer that waits in no round learns from it which rounds
    were skipped without it.
    """
    state = replace(state, term=max(state.term, view.term))
    version = state.applying.version if state.applying else state.version
    newest = view.version == version
    if state.pending is None and newest and view.round > state.round:
        state = replace(state, round=view.round)
    enters = state.phase is Phase.DECLARING or (state.phase is Phase.CATCHING_UP and newest)
    if enters and view.started and state.peer in view.members and state.applying is None:
        return outcome(replace(state, phase=Phase.LOCAL), view.reason, Resume())
    return outcome(state, view.reason)


def _hear_catch_up(state: MemberState, message: CatchUp) -> Outcome:
    """Whatever was under way here has no part in the run any more. An outer step is taken to its end first."""
    version = state.applying.version if state.applying else state.version
    lacks = message.version > version or not message.trusted
    if state.phase is Phase.CONNECTING or message.term < state.term or not lacks:
        return outcome(state, f"ignored an order to catch up with version {message.version}")
    aborts = (AbortAttempt(state.op, message.reason),) if state.phase is Phase.REDUCING else ()
    state = replace(state, phase=Phase.CATCHING_UP, term=message.term, pending=None, vote=None)
    return outcome(state, message.reason, *aborts, Order(message))


def _hear_probe(state: MemberState, message: Probe) -> Outcome:
    """Once it is ready a round may begin at any moment, and that round measures better."""
    targets = ", ".join(sorted(message.targets))
    if state.phase not in (Phase.LOCAL, Phase.APPLYING):
        return outcome(state, f"ignored an order to measure the links to {targets} in phase {state.phase}")
    return outcome(state, f"the links to {targets} are measured", MeasureLinks(message))


def _hear_reach(state: MemberState, message: Reach) -> Outcome:
    """Whatever it does meanwhile: a trial moves no more than a hello."""
    targets = ", ".join(sorted(message.targets))
    return outcome(state, f"{targets} are dialled, to see whom this peer reaches", MeasureLinks(message))


def _hear_freeze(state: MemberState, message: Freeze) -> Outcome:
    """While the verdict before is applied, too: the trainer looks at its next safe point."""
    if state.phase not in (Phase.LOCAL, Phase.APPLYING) or message.round != state.round + 1:
        return outcome(state, f"ignored a freeze of round {message.round} in phase {state.phase}")
    return outcome(
        state, f"round {message.round} is closed: freeze at the next step", RequestFreeze(message.round)
    )


def _hear_plan(state: MemberState, plan: Plan) -> Outcome:
    pending = state.pending
    if pending is None or plan.op.round != pending.round or plan.base_version != state.version:
        return outcome(state, f"ignored attempt {plan.op}: it is not for the round this peer waits in")
    if plan.op <= state.op or plan.op.term < state.term or state.peer not in plan.members:
        return outcome(state, f"ignored attempt {plan.op}: not newer than {state.op}, or not for this peer")
    aborts: tuple[Effect, ...] = ()
    if state.phase is Phase.REDUCING:
        aborts = (AbortAttempt(state.op, f"attempt {plan.op} takes its place"),)
    state = replace(state, phase=Phase.REDUCING, op=plan.op, vote=None)
    return outcome(state, f"{state.peer} reduces {plan.op}", *aborts, Order(plan))


def _hear_abort(state: MemberState, message: Abort) -> Outcome:
    """The trainer votes no when the engine lets go. An attempt not begun yet is answered right here."""
    if state.phase is Phase.REDUCING and message.op == state.op:
        return outcome(
            state, f"{message.op} is given up: {message.reason}", AbortAttempt(state.op, message.reason)
        )
    if state.phase not in IN_ROUND or message.op <= state.op:
        return outcome(state, f"ignored the end of {message.op}: it is not under way here")
    aborts = (AbortAttempt(state.op, message.reason),) if state.phase is Phase.REDUCING else ()
    vote = Vote(
        op=message.op, ok=False, digest="", broken=(), reason="ended before it began", stats=_NO_STATS
    )
    state = replace(state, phase=Phase.VOTED, op=message.op, vote=vote)
    return outcome(state, f"{message.op} ended before it began", *aborts, *send(state, vote))


def _hear_verdict(state: MemberState, verdict: Verdict) -> Outcome:
    skipped = verdict.outcome == "skipped"
    unheard = skipped and verdict.ends and state.phase in (Phase.DECLARING, Phase.LOCAL, Phase.READY)
    if verdict.op.round <= state.round and not unheard:
        return outcome(state, f"ignored the verdict of round {verdict.op.round}: it was obeyed already")
    if skipped:
        return _hear_skip(state, verdict)
    vote = state.vote
    holds = vote is not None and vote.ok and (vote.op, vote.digest) == (verdict.op, verdict.digest)
    if not holds or verdict.version != state.version + 1:
        return _miss(state, verdict)
    # ---- commit line: from here on this peer steps ----
    state, told = _told(_end_round(state, verdict, Phase.APPLYING), verdict)
    state = replace(state, applying=verdict, version_term=verdict.op.term)
    return outcome(state, verdict.reason, *told, Order(verdict))


def _hear_leases(state: MemberState, message: Leases) -> Outcome:
    """The newest counts, in whatever order they come. Of an older one at least the answer does."""
    told = _newest(state.told, message.slots)
    answered = state.wanted is not None and message.answers == state.wanted.number
    here = told is not None and told.version == state.version and state.applying is None
    state = replace(
        state,
        told=told,
        slots=told if here else state.slots,
        wanted=None if answered else state.wanted,
    )
    assert told is not None
    held = len(told.held(state.peer))
    effect = TellLeases(told, message.answers if answered else 0)
    return outcome(state, f"{state.peer} holds {held} data slots", effect)


def _newest(told: SlotTable | None, slots: SlotTable | None) -> SlotTable | None:
    if told is None or slots is None:
        return told or slots
    return slots if slots.stamp > told.stamp else told


def _miss(state: MemberState, verdict: Verdict) -> Outcome:
    """A commit whose result is not here: declare again, so that the coordinator tells how to catch up."""
    reason = (
        f"the run committed version {verdict.version} with {verdict.op}, whose result {state.peer} "
        f"(version {state.version}, phase {state.phase}) does not hold: it has to catch up"
    )
    if state.declare is None or state.phase is Phase.CATCHING_UP:
        return outcome(state, reason)
    aborts = (AbortAttempt(state.op, verdict.reason),) if state.phase is Phase.REDUCING else ()
    state = replace(state, phase=Phase.CATCHING_UP, pending=None, vote=None)
    return outcome(state, reason, *aborts, *send(state, declaration_of(state)))


def _hear_skip(state: MemberState, verdict: Verdict) -> Outcome:
    """The run's last is told to the trainer even if a view said before that its round is over: who has obeyed it is
    gone.
    """
    if state.phase not in IN_ROUND:
        last = (RequestFreeze(verdict.op.round + 1), Order(verdict)) if verdict.ends else ()
        return outcome(replace(state, round=verdict.op.round), verdict.reason, *last)
    aborts = (AbortAttempt(state.op, verdict.reason),) if state.phase is Phase.REDUCING else ()
    state, told = _told(_end_round(state, verdict, Phase.LOCAL), verdict)
    state = replace(state, slots=of_version(state.version, state.told))
    return outcome(state, verdict.reason, *aborts, *told, Order(verdict))


def _told(state: MemberState, verdict: Verdict) -> tuple[MemberState, tuple[Effect, ...]]:
    """The trainer has the verdict's leases, or newer ones, before it obeys the verdict."""
    told = _newest(state.told, verdict.slots)
    return replace(state, told=told), (TellLeases(told),) if told is not None else ()


def _end_round(state: MemberState, verdict: Verdict, phase: Phase) -> MemberState:
    return replace(state, phase=phase, round=verdict.op.round, pending=None, vote=None)
