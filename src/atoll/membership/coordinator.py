"""The coordinator's half of the protocol, as a pure machine: (state, event, now) -> (state, effects, reason).

It decides membership and rounds; it never touches weights, opens nothing, and asks no clock. What is heard is
recorded first (`admission`, `declaration`, `rounds`, `verdicts`), then everything that follows from the new
facts is decided in one fixed order (`_settle`). A crash between two effects loses nothing: what must survive
is journaled before it is sent, and `start` goes on from the journal under a higher term.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from atoll.membership import (
    admission,
    catching_up,
    declaration,
    learning,
    leasing,
    liveness,
    operator_requests,
    probing,
    reach,
    rounds,
    verdicts,
)
from atoll.membership.coordinator_draft import Draft, MakeLanes
from atoll.membership.coordinator_state import CoordinatorState, PeerRecord, counted, ids, listed
from atoll.membership.differences import settings_difference
from atoll.membership.messages import (
    Applied,
    CaughtUp,
    Declare,
    Heartbeat,
    HeartbeatAck,
    Leave,
    Probed,
    Reached,
    Ready,
    Scalar,
    SlotsWanted,
    SnapshotWanted,
    Vote,
)
from atoll.membership.recollection import recollect
from atoll.membership.replay import replay
from atoll.membership.settings import CoordinatorSettings
from atoll.membership.steps import (
    CloseConnection,
    CoordinatorEvent,
    Finish,
    Journal,
    JournalRecord,
    OperatorSaid,
    PeerArrived,
    PeerDropped,
    PeerSaid,
    Step,
    TermRaised,
    Tick,
)

__all__ = ["CoordinatorState", "refusal", "start", "step"]


def start(
    settings: CoordinatorSettings,
    records: Sequence[JournalRecord],
    session_key: bytes,
    run_settings: dict[str, Scalar] | None,
    now_s: float,
) -> Step[CoordinatorState]:
    """Begin a run, or go on with the one whose journal holds `records`; the new term is journaled first.

    `session_key` is used if the journal has none. A journal of a run with other settings is refused
    (Finish, exit 2).
    """
    state = replay(settings, records, session_key, run_settings, now_s)
    if run_settings is not None and state.run_settings is not None:
        journaled = {key: value for key, value in state.run_settings.items() if key in run_settings}
        difference = settings_difference(journaled, run_settings, "the coordinator's configuration")
        if difference is not None:
            reason = (
                f"the journal belongs to a run with other settings: {difference}; "
                "use another journal or another run name"
            )
            return Step(replace(state, over=reason), (Finish(reason, 2),), reason)
    if state.stopping and not (state.started and state.members()):
        reason = (
            f"run {settings.run} is over already: {state.stopping}; to begin a new one give another run name"
        )
        return Step(replace(state, over=reason), (Finish(reason, 0),), reason)
    if state.done and not state.members():
        reason = (
            f"run {settings.run} is over already, at version {state.version}: all its peers left; "
            "to begin a new one give another run name, or remove the journal"
        )
        return Step(replace(state, over=reason), (Finish(reason, 0),), reason)
    if not records:
        wanted = counted(settings.start_peers, "peer")
        reason = f"run {settings.run} begins: term {state.term}, waiting for {wanted}"
    else:
        expected = listed(ids(state.members()))
        where = f"at version {state.version}: term {state.term}"
        reason = f"run {settings.run} goes on {where}, waiting for {expected}"
    return Step(state, (Journal(TermRaised(term=state.term, session_key=state.session_key)),), reason)


def step(
    state: CoordinatorState, event: CoordinatorEvent, now_s: float, *, make_lanes: MakeLanes
) -> Step[CoordinatorState]:
    """Take in one event at `now_s` (monotonic seconds). `make_lanes` (`atoll.plan.planner.choose`) gives
    the lanes for an attempt, and the members to drop because no lane can serve them. Never raises for what
    peers do.
    """
    if state.over:
        return Step(state, (), state.over)
    state, effective_s = liveness.pass_time(state, now_s)
    before, draft = state, Draft(state, effective_s, make_lanes)
    waiting = _settle(draft, isinstance(event, Tick)) if _record(draft, event) else None
    draft.set(recollection=recollect(before, draft, waiting))
    return draft.step(waiting or "")


def refusal(state: CoordinatorState, peer: str, incarnation: str, now_s: float) -> str:
    """Why a connection of this process is not to be accepted at `now_s`, in a sentence; "" if it is.

    To be asked before a PeerArrived is taken in at the same `now_s`, which then decides the same.
    """
    state, effective_s = liveness.pass_time(state, now_s)
    return admission.refusal(state, peer, incarnation, effective_s)


def _record(draft: Draft, event: CoordinatorEvent) -> bool:
    """Take note of what happened; returns whether anything may have to be decided because of it."""
    match event:
        case Tick():
            return True
        case PeerArrived():
            admission.arrive(draft, event)
            return True
        case OperatorSaid():
            operator_requests.hear(draft, event)
            return True
    record = draft.state.peers.get(event.peer)
    if record is None or record.incarnation != event.incarnation:
        _hear_stranger(draft, event)
        return False
    if isinstance(event, PeerDropped):
        admission.drop(draft, record, event)
        return True
    return _hear(draft, record, event)


def _hear_stranger(draft: Draft, event: PeerSaid | PeerDropped) -> None:
    """An old process under a known id has no voice; a peer that was lost has to connect and declare anew."""
    if event.peer in draft.state.peers or draft.state.is_fenced(event.peer, event.incarnation):
        draft.because(f"ignored an old process of {event.peer}")
    elif isinstance(event, PeerSaid) and not isinstance(event.message, Leave):
        draft.effects.append(CloseConnection(event.peer, event.incarnation))
        draft.because(f"{event.peer} is no member any more: it has to connect and declare again")
    else:
        draft.because(f"{event.peer} is gone")


def _hear(draft: Draft, record: PeerRecord, event: PeerSaid) -> bool:
    message = event.message
    if isinstance(message, Heartbeat):
        _hear_heartbeat(draft, record, message)
        return False
    record = replace(record, heard_s=draft.now_s)
    draft.put(record)
    match message:
        case Declare():
            declaration.declare(draft, record, message)
        case Leave():
            admission.leave(draft, record, message)
        case CaughtUp():
            catching_up.hear_caught_up(draft, record, message)
        case SnapshotWanted():
            catching_up.hear_snapshot_wanted(draft, record, message)
        case Applied() if record.catching_up is not None:
            catching_up.hear_applied(draft, record, message)
        case Ready() if record.catching_up is not None:
            catching_up.tell_again(draft, record)
        case _ if not record.member:
            draft.because(f"ignored what {record.peer} says before it is a member")
        case Probed():
            probing.hear_probed(draft, record, message)
            return False
        case Reached():
            reach.hear_reached(draft, record, message)
        case Ready():
            rounds.record_ready(draft, record, message)
        case SlotsWanted():
            leasing.hear_wanted(draft, record, message)
        case Vote():
            verdicts.record_vote(draft, record, message)
        case Applied():
            rounds.record_applied(draft, record, message)
            return bool(draft.effects)
        case _:
            draft.because(f"ignored a second {type(message).__name__} of {record.peer}")
    return True


def _hear_heartbeat(draft: Draft, record: PeerRecord, message: Heartbeat) -> None:
    moved = message.step > record.step
    draft.put(
        replace(
            record,
            heard_s=draft.now_s,
            step=max(message.step, record.step),
            moved_s=draft.now_s if moved else record.moved_s,
            phase=message.phase,
            steps_in_round=message.steps_in_round,
            round_steps=message.round_steps,
        )
    )
    draft.send(record.peer, HeartbeatAck(term=draft.state.term))
    draft.because(f"{record.peer} lives, at step {message.step}")


def _settle(draft: Draft, time_passed: bool) -> str:
    """Decide until nothing more follows from the recorded facts; returns what is waited for now. Who fell silent is
    looked for when `time_passed` alone: to look at everybody is dear, and ticks come often."""
    if time_passed:
        liveness.lose_silent(draft)
    while True:
        before = draft.state
        waiting = _decide(draft)
        if draft.state is before or draft.state.over:
            return waiting


def _decide(draft: Draft) -> str:
    verdicts.settle_attempt(draft)
    learning.roll_back(draft)
    leasing.take_back(draft)
    catching_up.settle(draft)
    _start_run(draft)
    operator_requests.settle_stop(draft)
    _end_run(draft)
    reach.ask(draft)
    probing.ask(draft)
    return draft.state.over or rounds.advance_round(draft)


def _start_run(draft: Draft) -> None:
    state = draft.state
    members = state.members()
    if state.started or len(members) < learning.wanted_to_start(draft):
        return
    peers = {peer: replace(record, moved_s=draft.now_s) for peer, record in state.peers.items()}
    draft.set(started=True, peers=peers, begun_s=draft.now_s + state.paused_s)
    reason = f"the run starts with {listed(ids(members))}"
    draft.because(reason)
    leasing.start(draft)
    draft.members_changed(reason)


def _end_run(draft: Draft) -> None:
    if draft.state.over:
        return
    if draft.state.started and draft.state.done and not draft.state.members():
        admission.end_run(
            draft, "ended", f"the run is done at version {draft.state.version}: all peers left", 0
        )
        return
    liveness.watch_quorum(draft)
