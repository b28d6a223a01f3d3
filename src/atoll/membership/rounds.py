"""When a round starts: what members say, and the policy.

A round is open until it has a verdict. Policy `wait`: it starts when all members are ready, or without those
who are not after `ready_wait_s`. Policy `deadline`: half of the members being ready starts the grace time;
when that is over the others are asked to freeze, and who does not answer within `freeze_s` is not planned. The
run's last round is closed at once, under either policy. A retry does not wait: it plans the members that are
ready then. Nor is a peer waited for that became a member while the round was open: once all others are ready it
is asked for what it has, and does not answer for long.
"""

from __future__ import annotations

from msgspec.structs import replace

from atoll.membership import reach
from atoll.membership.admission import lose
from atoll.membership.coordinator_draft import Draft
from atoll.membership.coordinator_state import PeerRecord, counted, ids, listed
from atoll.membership.messages import Applied, Freeze, Ready
from atoll.membership.planning import agree_on_digest, plan_attempt

# ---- what members say ------------------------------------------------------------------------------------


def record_ready(draft: Draft, record: PeerRecord, message: Ready) -> None:
    state = draft.state
    if state.verdict is not None and state.ending():
        draft.send(record.peer, state.verdict)
    if (message.round, message.version) != (state.round.number, state.version):
        draft.because(
            f"ignored a ready of {record.peer} for round {message.round} on version {message.version}: "
            f"the open round is {state.round.number}, the newest version {state.version}"
        )
        return
    draft.put(replace(record, ready=message, digest=message.digest, moved_s=draft.now_s, wish=message.wish))
    draft.because(
        f"{record.peer} is ready for round {message.round} ({message.tokens} tokens in {message.steps} steps)"
    )


def record_applied(draft: Draft, record: PeerRecord, message: Applied) -> None:
    state = draft.state
    if message.version != state.version:
        draft.because(
            f"ignored what {record.peer} says of version {message.version}; the newest is {state.version}"
        )
        return
    if record.ready is None:  # what a `ready` says of the state is newer
        draft.put(replace(record, digest=message.digest, moved_s=draft.now_s))
    draft.because(f"{record.peer} holds version {message.version}")
    agree_on_digest(draft, everybody=True)


# ---- when a round starts ---------------------------------------------------------------------------------


def advance_round(draft: Draft) -> str:
    """Plan an attempt if it is time for one; otherwise returns what is waited for, in a sentence."""
    if waiting := _blocked(draft):
        return waiting
    state = draft.state
    members = state.members()
    ready = tuple(record for record in members if record.ready is not None)
    slow = tuple(record for record in members if record.ready is None) if len(ready) < len(members) else ()
    idle = sum(record.ready is not None and record.ready.steps == 0 for record in ready)
    _note_progress(draft, len(ready) - idle, len(members) - idle, idle)
    retry = state.round.attempts > 0 and len(ready) >= state.settings.min_peers
    if slow and not retry and not _done_waiting(draft, ready, slow):
        if not ready:
            return f"round {state.round.number} is under way: {counted(len(members), 'member')} in LOCAL"
        waited = listed(ids(slow))
        return f"round {state.round.number}: {len(ready)} of {len(members)} ready, waiting for {waited}"
    away = [record.peer for record in ready if not record.connected]
    if away:
        return f"round {state.round.number} waits for {listed(away)} to reconnect"
    if waiting := reach.awaited(draft, ready):
        return f"round {state.round.number}: {waiting}"
    if len(draft.state.members()) == len(members):
        plan_attempt(draft, ready)
    return ""


def _blocked(draft: Draft) -> str:
    """Why there can be no new attempt now; "" if there can."""
    state, settings = draft.state, draft.state.settings
    members = state.members()
    if not state.started:
        names = listed(ids(members))
        return f"waiting for peers: {len(members)} of {settings.start_peers} declared ({names})"
    if state.relearns_until_s is not None and draft.now_s < state.relearns_until_s:
        here = listed(ids(members))
        return f"the journal was lost: peers that may know more are waited for ({here} are here)"
    if state.ending():
        return f"the run is over, waiting for {listed(ids(members))} to leave"
    if len(members) < settings.min_peers:
        living = f"{len(members)} live ({listed(ids(members))})"
        return f"waiting for members: {living}, min_peers is {settings.min_peers}"
    if state.round.attempt is not None:
        plan, votes = state.round.attempt.plan, state.round.attempt.votes
        return f"attempt {plan.op}: waiting for the votes of {listed(set(plan.members) - set(votes))}"
    return ""


def _note_progress(draft: Draft, num_ready: int, num_members: int, num_idle: int) -> None:
    """Remember since when somebody, and since when enough members, are ready. Those who took no step, `num_idle`, are
    counted apart: they have nothing to wait with, and must not hurry those who train."""
    round_, now_s = draft.state.round, draft.now_s
    first_ready_s = (now_s if round_.first_ready_s is None else round_.first_ready_s) if num_ready else None
    enough = num_ready > 0 and num_ready >= quorum(num_members, draft.state.settings.min_peers - num_idle)
    quorum_s = (now_s if round_.quorum_s is None else round_.quorum_s) if enough else None
    if (first_ready_s, quorum_s) != (round_.first_ready_s, round_.quorum_s):
        draft.set_round(first_ready_s=first_ready_s, quorum_s=quorum_s)


def quorum(num_members: int, min_peers: int) -> int:
    """Policy `deadline`: so many ready members start the grace time: half of them, and at least
    `min_peers`.
    """
    return max(min_peers, (num_members + 1) // 2)


def _done_waiting(draft: Draft, ready: tuple[PeerRecord, ...], slow: tuple[PeerRecord, ...]) -> bool:
    """Whether the round goes on without those who are not ready. May ask them to freeze, or lose them."""
    settings, timeouts, round_ = draft.state.settings, draft.timeouts, draft.state.round
    new = {record.peer for record in (*ready, *slow) if record.joined_round == round_.number}
    # Newcomers are not waited for; unless all are new, as after a roll-back: then they begin together.
    if len(ready) >= settings.min_peers and new.issuperset(ids(slow)) and not new.issuperset(ids(ready)):
        if round_.closed_s is None:
            _close(draft, slow)
        return _over(draft, draft.state.round.closed_s, min(timeouts.freeze_s, 2 * timeouts.heartbeat_s))
    ready_wait_over = _over(draft, round_.first_ready_s, timeouts.ready_wait_s)
    deadline = settings.policy == "deadline" or bool(draft.state.stopping)
    grace_over = deadline and (ready_wait_over or _over(draft, round_.quorum_s, timeouts.grace_s))
    if round_.closed_s is None and (grace_over or draft.why_last()):
        _close(draft, slow)
        return False
    if deadline:
        if not ready or not _over(draft, round_.closed_s, timeouts.freeze_s):
            return False
        if len(ready) >= settings.min_peers:
            draft.because(f"{listed(ids(slow))} did not freeze within freeze_s = {timeouts.freeze_s:g} s")
            return True
    elif not ready_wait_over:
        return False
    limit = (
        f"freeze_s = {timeouts.freeze_s:g} s" if deadline else f"ready_wait_s = {timeouts.ready_wait_s:g} s"
    )
    for record in slow:
        lose(draft, record, f"it was not ready for round {round_.number} within {limit}")
    return True


def _over(draft: Draft, since_s: float | None, limit_s: float) -> bool:
    return since_s is not None and draft.now_s - since_s >= limit_s


def _close(draft: Draft, slow: tuple[PeerRecord, ...]) -> None:
    number = draft.state.round.number
    draft.set_round(closed_s=draft.now_s)
    draft.because(
        f"round {number} is closed: {listed(ids(slow))} asked to freeze and to contribute what they have"
    )
    for record in slow:
        draft.send(record.peer, Freeze(term=draft.state.term, round=number))
