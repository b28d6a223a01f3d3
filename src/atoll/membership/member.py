"""A peer's half of the protocol, as a pure machine: (state, event, now) -> (state, effects, reason).

A peer trains only in LOCAL. From its `ready` on it waits, whatever happens to the connection, until it is
told the round's verdict: it repeats what it said after every reconnect, obeys a newer attempt at the same
round, and obeys one verdict once. It steps only on a committed verdict for the result that it holds and voted
yes for. If the run went on without it, it is told to catch up; it drops what it was doing, fetches what it
lacks, says what it holds, and is in LOCAL again once a view names it. While it waits it gives a lost
coordinator `coordinator_lost_s`; in LOCAL it goes on training and waits at the next `ready`.

    CONNECTING -> DECLARING -> LOCAL -> READY -> REDUCING -> VOTED -> APPLYING -> LOCAL ...     OVER
                                 ^ ---- CATCHING_UP <- from any of these
"""

from __future__ import annotations

from msgspec.structs import replace

from atoll.membership.leases import SlotTable
from atoll.membership.member_state import IN_ROUND, WAITING, MemberState, Phase
from atoll.membership.messages import (
    Abort,
    Applied,
    AskToLeave,
    CatchUp,
    CaughtUp,
    CoordinatorMessage,
    Declare,
    Ended,
    Freeze,
    HeartbeatAck,
    Leases,
    Leave,
    Message,
    PeerMessage,
    Probe,
    Probed,
    Ready,
    Reduce,
    Refused,
    Serve,
    SlotsWanted,
    SnapshotWanted,
    Verdict,
    View,
    Vote,
)
from atoll.membership.settings import Timeouts
from atoll.membership.steps import (
    AbortAttempt,
    Connected,
    CoordinatorSaid,
    Disconnected,
    Effect,
    Fail,
    MeasureLinks,
    MemberEvent,
    Order,
    RequestFreeze,
    RequestLeave,
    Resume,
    Send,
    ServeOthers,
    Step,
    TellLeases,
    Tick,
    TrainerSaid,
)
from atoll.values import Plan, TransferStats

_NO_STATS = TransferStats()


__all__ = ["MemberState", "Phase", "start", "step"]

Outcome = Step[MemberState]


def start(peer: str, timeouts: Timeouts, now_s: float) -> Outcome:
    """A process that has not declared yet. `timeouts` are the coordinator's."""
    return _step(MemberState(peer=peer, timeouts=timeouts, last_s=now_s, heard_s=now_s), f"{peer} begins")


def step(state: MemberState, event: MemberEvent, now_s: float) -> Outcome:
    """Take in one event at `now_s` (monotonic seconds). Asserts that the trainer keeps to the phases."""
    if state.phase is Phase.OVER:
        return _step(state, f"{state.peer} has left the run")
    state = _pass_time(state, now_s)
    match event:
        case Tick():
            return _tick(state, now_s)
        case Connected(term=term):
            return _connect(replace(state, connected=True, heard_s=now_s), term)
        case Disconnected():
            return _step(replace(state, connected=False), f"the connection is lost in phase {state.phase}")
        case CoordinatorSaid(message=message):
            return _hear(replace(state, heard_s=now_s), message)
        case TrainerSaid(message=message):
            return _say(state, message)


def _step(state: MemberState, reason: str, *effects: Effect) -> Outcome:
    return Step(state, effects, reason)


def _send(state: MemberState, message: Message) -> tuple[Effect, ...]:
    """Without a connection nothing is sent: everything is said again after the next one is made."""
    return (Send("", message),) if state.connected else ()


def _fail(state: MemberState, kind: str, reason: str) -> Outcome:
    aborts = (AbortAttempt(state.op, reason),) if state.phase is Phase.REDUCING else ()
    return _step(replace(state, phase=Phase.OVER), reason, *aborts, Fail(kind, reason))


# ---- time and the connection -----------------------------------------------------------------------------


def _pass_time(state: MemberState, now_s: float) -> MemberState:
    """A silence longer than a heartbeat is our own pause (ticks come faster); it is not the coordinator's."""
    gap_s = now_s - state.last_s
    paused_s = gap_s if gap_s > state.timeouts.heartbeat_s else 0.0
    return replace(state, last_s=now_s, heard_s=state.heard_s + paused_s)


def _tick(state: MemberState, now_s: float) -> Outcome:
    silent_s = now_s - state.heard_s
    if state.phase not in WAITING or silent_s < state.timeouts.coordinator_lost_s:
        return _step(state, f"{state.peer} is in phase {state.phase}, version {state.version}")
    reason = (
        f"nothing was heard from the coordinator for coordinator_lost_s = "
        f"{state.timeouts.coordinator_lost_s:g} s while {state.peer} waited in phase {state.phase} "
        f"(round {state.round + 1}, version {state.version}); "
        "check that the coordinator runs and can be reached, then start this peer again"
    )
    return _fail(state, "unreachable", reason)


def _connect(state: MemberState, term: int) -> Outcome:
    """Say again what a coordinator may not have heard. Under a new term the attempt under way is dead."""
    aborts: tuple[Effect, ...] = ()
    if term > state.term and state.phase is Phase.REDUCING:
        aborts = (AbortAttempt(state.op, f"the coordinator started again (term {term})"),)
        state = replace(state, phase=Phase.READY)
    declaration = _declaration(state) if state.declare else None
    state = replace(state, term=max(term, state.term))
    if declaration is None:
        return _step(state, f"connected to the coordinator, term {state.term}", *aborts)
    said = _send(state, declaration)
    if state.vote is not None and state.vote.op.term == state.term:
        said += _send(state, state.vote)
    if state.wanted is not None:
        said += _send(state, state.wanted)
    what = (
        f"waits for the verdict of round {state.pending.round}"
        if state.pending
        else f"is in phase {state.phase}"
    )
    return _step(
        state, f"connected, term {state.term}: {state.peer} declares again and {what}", *aborts, *said
    )


def _declaration(state: MemberState) -> Declare:
    assert state.declare is not None
    return replace(
        state.declare,
        version=state.version,
        round=state.round,
        digest=state.digest,
        pending=state.pending,
        term=state.term,
        version_term=state.version_term,
        applying=state.applying is not None,
        slots=state.slots,
        leases=state.told.held(state.peer) if state.told is not None else (),
    )


# ---- the training thread ---------------------------------------------------------------------------------


def _say(state: MemberState, message: PeerMessage) -> Outcome:
    match message:
        case Declare():
            assert state.phase is Phase.CONNECTING, f"declared twice: phase {state.phase}"
            state = replace(
                state,
                phase=Phase.DECLARING,
                declare=message,
                version=message.version,
                round=message.round,
                digest=message.digest,
                version_term=message.version_term,
                slots=message.slots,
            )
            return _step(state, f"{state.peer} declares version {state.version}", *_send(state, message))
        case Ready():
            return _say_ready(state, message)
        case Vote():
            return _say_vote(state, message)
        case Applied():
            assert state.applying is not None, f"nothing to apply in phase {state.phase}"
            assert message.version == state.applying.version, "applied another version than the verdict's"
            phase = Phase.LOCAL if state.phase is Phase.APPLYING else state.phase
            state = replace(
                state,
                phase=phase,
                version=message.version,
                digest=message.digest,
                applying=None,
                slots=_of_version(message.version, state.told, state.applying.slots),
            )
            return _step(state, f"{state.peer} holds version {state.version}", *_send(state, message))
        case SlotsWanted(more=more):
            state = replace(state, wanted=message)
            return _step(state, f"{state.peer} asks for {more} more data slots", *_send(state, message))
        case SnapshotWanted():
            return _step(state, f"{state.peer} asks for a snapshot", *_send(state, message))
        case CaughtUp():
            return _say_caught_up(state, message)
        case Probed():
            return _step(state, f"{state.peer} has measured its links", *_send(state, message))
        case Leave():
            aborts = (AbortAttempt(state.op, message.reason),) if state.phase is Phase.REDUCING else ()
            over = replace(state, phase=Phase.OVER)
            return _step(over, f"{state.peer} leaves: {message.reason}", *aborts, *_send(state, message))
        case _:
            raise AssertionError(f"not for the training thread to say: {message!r}")


def _say_ready(state: MemberState, message: Ready) -> Outcome:
    """The round is the coordinator's to number: a round skipped meanwhile makes this `ready` the next one's. What it
    says of the round after its own holds no more then.
    """
    if state.phase is Phase.CATCHING_UP:
        return _step(state, f"{state.peer} was ready, but has to catch up first")
    assert state.phase is Phase.LOCAL, f"ready in phase {state.phase}"
    assert message.version == state.version, f"ready on version {message.version}, holds {state.version}"
    number = state.round + 1
    round_steps = message.round_steps if message.round == number else 0
    pending = replace(message, round=number, round_steps=round_steps)
    state = replace(state, phase=Phase.READY, pending=pending, digest=message.digest)
    if state.declare is not None:
        state = replace(state, declare=replace(state.declare, wish=message.wish))
    return _step(state, f"{state.peer} is ready for round {pending.round}", *_send(state, pending))


def _say_vote(state: MemberState, message: Vote) -> Outcome:
    if state.phase is not Phase.REDUCING or message.op != state.op:
        return _step(state, f"the vote on {message.op} is late: the attempt was given up already")
    state = replace(state, phase=Phase.VOTED, vote=message)
    answer = "yes" if message.ok else f"no ({message.reason})"
    return _step(state, f"{state.peer} votes {answer} on {message.op}", *_send(state, message))


def _say_caught_up(state: MemberState, message: CaughtUp) -> Outcome:
    assert state.phase is Phase.CATCHING_UP, f"caught up in phase {state.phase}"
    state = replace(
        state,
        version=message.version,
        version_term=state.term,
        round=message.round,
        digest=message.digest,
        slots=_of_version(message.version, state.told, None),
    )
    return _step(state, f"{state.peer} has caught up with version {message.version}", *_send(state, message))


# ---- the coordinator -------------------------------------------------------------------------------------


def _hear(state: MemberState, message: CoordinatorMessage) -> Outcome:
    match message:
        case HeartbeatAck():
            return _step(state, "the coordinator lives")
        case View():
            return _hear_view(state, message)
        case CatchUp():
            return _hear_catch_up(state, message)
        case Serve(version=version, stage=stage):
            return _step(state, "somebody catches up", ServeOthers(version, stage))
        case Probe():
            return _hear_probe(state, message)
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
            return _step(state, reason, RequestLeave(reason))
        case Refused(reason=reason):
            return _fail(state, "refused", reason)
        case Ended(kind=kind, reason=reason):
            return _fail(state, kind, reason)
        case _:
            return _step(state, f"ignored a {type(message).__name__} on a connection that is proven")


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
        return _step(replace(state, phase=Phase.LOCAL), view.reason, Resume())
    return _step(state, view.reason)


def _hear_catch_up(state: MemberState, message: CatchUp) -> Outcome:
    """Whatever was under way here has no part in the run any more. An outer step is taken to its end first."""
    version = state.applying.version if state.applying else state.version
    lacks = message.version > version or not message.trusted
    if state.phase is Phase.CONNECTING or message.term < state.term or not lacks:
        return _step(state, f"ignored an order to catch up with version {message.version}")
    aborts = (AbortAttempt(state.op, message.reason),) if state.phase is Phase.REDUCING else ()
    state = replace(state, phase=Phase.CATCHING_UP, term=message.term, pending=None, vote=None)
    return _step(state, message.reason, *aborts, Order(message))


def _hear_probe(state: MemberState, message: Probe) -> Outcome:
    """Once it is ready a round may begin at any moment, and that round measures better."""
    targets = ", ".join(sorted(message.targets))
    if state.phase not in (Phase.LOCAL, Phase.APPLYING):
        return _step(state, f"ignored an order to measure the links to {targets} in phase {state.phase}")
    return _step(state, f"the links to {targets} are measured", MeasureLinks(message))


def _hear_freeze(state: MemberState, message: Freeze) -> Outcome:
    """While the verdict before is applied, too: the trainer looks at its next safe point."""
    if state.phase not in (Phase.LOCAL, Phase.APPLYING) or message.round != state.round + 1:
        return _step(state, f"ignored a freeze of round {message.round} in phase {state.phase}")
    return _step(
        state, f"round {message.round} is closed: freeze at the next step", RequestFreeze(message.round)
    )


def _hear_plan(state: MemberState, plan: Plan) -> Outcome:
    pending = state.pending
    if pending is None or plan.op.round != pending.round or plan.base_version != state.version:
        return _step(state, f"ignored attempt {plan.op}: it is not for the round this peer waits in")
    if plan.op <= state.op or plan.op.term < state.term or state.peer not in plan.members:
        return _step(state, f"ignored attempt {plan.op}: not newer than {state.op}, or not for this peer")
    aborts: tuple[Effect, ...] = ()
    if state.phase is Phase.REDUCING:
        aborts = (AbortAttempt(state.op, f"attempt {plan.op} takes its place"),)
    state = replace(state, phase=Phase.REDUCING, op=plan.op, vote=None)
    return _step(state, f"{state.peer} reduces {plan.op}", *aborts, Order(plan))


def _hear_abort(state: MemberState, message: Abort) -> Outcome:
    """The trainer votes no when the engine lets go. An attempt not begun yet is answered right here."""
    if state.phase is Phase.REDUCING and message.op == state.op:
        return _step(
            state, f"{message.op} is given up: {message.reason}", AbortAttempt(state.op, message.reason)
        )
    if state.phase not in IN_ROUND or message.op <= state.op:
        return _step(state, f"ignored the end of {message.op}: it is not under way here")
    aborts = (AbortAttempt(state.op, message.reason),) if state.phase is Phase.REDUCING else ()
    vote = Vote(
        op=message.op, ok=False, digest="", broken=(), reason="ended before it began", stats=_NO_STATS
    )
    state = replace(state, phase=Phase.VOTED, op=message.op, vote=vote)
    return _step(state, f"{message.op} ended before it began", *aborts, *_send(state, vote))


def _hear_verdict(state: MemberState, verdict: Verdict) -> Outcome:
    skipped = verdict.outcome == "skipped"
    unheard = skipped and verdict.ends and state.phase in (Phase.DECLARING, Phase.LOCAL, Phase.READY)
    if verdict.op.round <= state.round and not unheard:
        return _step(state, f"ignored the verdict of round {verdict.op.round}: it was obeyed already")
    if skipped:
        return _hear_skip(state, verdict)
    vote = state.vote
    holds = vote is not None and vote.ok and (vote.op, vote.digest) == (verdict.op, verdict.digest)
    if not holds or verdict.version != state.version + 1:
        return _miss(state, verdict)
    # ---- commit line: from here on this peer steps ----
    state, told = _told(_end_round(state, verdict, Phase.APPLYING), verdict)
    state = replace(state, applying=verdict, version_term=verdict.op.term)
    return _step(state, verdict.reason, *told, Order(verdict))


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
    return _step(state, f"{state.peer} holds {held} data slots", effect)


def _newest(told: SlotTable | None, slots: SlotTable | None) -> SlotTable | None:
    if told is None or slots is None:
        return told or slots
    return slots if slots.stamp > told.stamp else told


def _of_version(version: int, *tables: SlotTable | None) -> SlotTable | None:
    """The newest of these that is of this version."""
    known = [table for table in tables if table is not None and table.version == version]
    return max(known, key=lambda table: table.stamp, default=None)


def _miss(state: MemberState, verdict: Verdict) -> Outcome:
    """A commit whose result is not here: declare again, so that the coordinator tells how to catch up."""
    reason = (
        f"the run committed version {verdict.version} with {verdict.op}, whose result {state.peer} "
        f"(version {state.version}, phase {state.phase}) does not hold: it has to catch up"
    )
    if state.declare is None or state.phase is Phase.CATCHING_UP:
        return _step(state, reason)
    aborts = (AbortAttempt(state.op, verdict.reason),) if state.phase is Phase.REDUCING else ()
    state = replace(state, phase=Phase.CATCHING_UP, pending=None, vote=None)
    return _step(state, reason, *aborts, *_send(state, _declaration(state)))


def _hear_skip(state: MemberState, verdict: Verdict) -> Outcome:
    """The run's last is told to the trainer even if a view said before that its round is over: who has obeyed it is
    gone.
    """
    if state.phase not in IN_ROUND:
        last = (RequestFreeze(verdict.op.round + 1), Order(verdict)) if verdict.ends else ()
        return _step(replace(state, round=verdict.op.round), verdict.reason, *last)
    aborts = (AbortAttempt(state.op, verdict.reason),) if state.phase is Phase.REDUCING else ()
    state, told = _told(_end_round(state, verdict, Phase.LOCAL), verdict)
    state = replace(state, slots=_of_version(state.version, state.told))
    return _step(state, verdict.reason, *aborts, *told, Order(verdict))


def _told(state: MemberState, verdict: Verdict) -> tuple[MemberState, tuple[Effect, ...]]:
    """The trainer has the verdict's leases, or newer ones, before it obeys the verdict."""
    told = _newest(state.told, verdict.slots)
    return replace(state, told=told), (TellLeases(told),) if told is not None else ()


def _end_round(state: MemberState, verdict: Verdict, phase: Phase) -> MemberState:
    return replace(state, phase=phase, round=verdict.op.round, pending=None, vote=None)
