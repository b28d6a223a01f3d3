"""When a round starts, and who is planned: ready members, the policy, digests, weights, lanes.

A round is open until it has a verdict. Policy `wait`: it starts when all members are ready, or without those
who are not after `ready_wait_s`. Policy `deadline`: half of the members being ready starts the grace time;
when that is over the others are asked to freeze, and who does not answer within `freeze_s` is not planned. A
retry does not wait: it plans the members that are ready then.

Links that broke in an attempt carry nothing in the next ones. If no lane avoids the broken links they are
tried once more in the same round, as a reset connection is no reason to lose a peer that lives; then the
smallest set goes.
"""

from __future__ import annotations

from msgspec.structs import replace

from atoll import events
from atoll.membership import exclusion
from atoll.membership.admission import dismiss, diverged, lose
from atoll.membership.coordinator_state import Attempt, Draft, PeerRecord, counted, ids, listed, majority
from atoll.membership.exclusion import Selection
from atoll.membership.messages import Applied, Freeze, Ready, Reduce
from atoll.membership.steps import PlanMade, StateDigest
from atoll.membership.verdicts import skip
from atoll.values import Lane, OpId, Plan

# ---- what members say ------------------------------------------------------------------------------------


def record_ready(draft: Draft, record: PeerRecord, message: Ready) -> None:
    state = draft.state
    if (message.round, message.version) != (state.round.number, state.version):
        draft.because(
            f"ignored a ready of {record.peer} for round {message.round} on version {message.version}: "
            f"the open round is {state.round.number}, the newest version {state.version}"
        )
        return
    draft.put(replace(record, ready=message, digest=message.digest, moved_s=draft.now_s))
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


def agree_on_digest(draft: Draft, *, everybody: bool) -> None:
    """Settle which digest the newest version has, and part with those who hold another one.

    The journaled digest decides; while there is none, the majority of those who reported one (`everybody`:
    not before all members did), a tie going to the oldest.
    """
    state = draft.state
    reported = [record for record in state.members() if record.digest]
    if not state.digest:
        if not reported or (everybody and len(reported) < len(state.members())):
            return
        draft.set(digest=majority(record.digest for record in reported))
        draft.journal(StateDigest(version=state.version, digest=draft.state.digest))
    for record in reported:
        if record.digest != draft.state.digest:
            diverged(draft, record, record.digest)


# ---- when a round starts ---------------------------------------------------------------------------------


def advance_round(draft: Draft) -> str:
    """Plan an attempt if it is time for one; otherwise returns what is waited for, in a sentence."""
    if waiting := _blocked(draft):
        return waiting
    state = draft.state
    members = state.members()
    ready = tuple(record for record in members if record.ready is not None)
    slow = tuple(record for record in members if record.ready is None)
    _note_progress(draft, len(ready), len(members))
    retry = state.round.attempts > 0 and len(ready) >= state.settings.min_peers
    if slow and not retry and not _done_waiting(draft, ready, slow):
        if not ready:
            return f"round {state.round.number} is under way: {counted(len(members), 'member')} in LOCAL"
        waited = listed(ids(slow))
        return f"round {state.round.number}: {len(ready)} of {len(members)} ready, waiting for {waited}"
    away = [record.peer for record in ready if not record.connected]
    if away:
        return f"round {state.round.number} waits for {listed(away)} to reconnect"
    if len(draft.state.members()) == len(members):
        plan_attempt(draft, ready)
    return ""


def _blocked(draft: Draft) -> str:
    """Why there can be no new attempt now; "" if there can."""
    state, settings = draft.state, draft.state.settings
    names = ids(state.members())
    if not state.started:
        return f"waiting for peers: {len(names)} of {settings.start_peers} declared ({listed(names)})"
    if state.ending():
        return f"the run is over, waiting for {listed(names)} to leave"
    if len(names) < settings.min_peers:
        return f"waiting for members: {len(names)} live ({listed(names)}), min_peers is {settings.min_peers}"
    if state.round.attempt is not None:
        plan, votes = state.round.attempt.plan, state.round.attempt.votes
        return f"attempt {plan.op}: waiting for the votes of {listed(set(plan.members) - set(votes))}"
    return ""


def _note_progress(draft: Draft, num_ready: int, num_members: int) -> None:
    """Remember since when somebody, and since when enough members, are ready."""
    round_, now_s = draft.state.round, draft.now_s
    first_ready_s = (now_s if round_.first_ready_s is None else round_.first_ready_s) if num_ready else None
    enough = num_ready >= quorum(num_members, draft.state.settings.min_peers)
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
    ready_wait_over = _over(draft, round_.first_ready_s, timeouts.ready_wait_s)
    deadline = settings.policy == "deadline"
    grace_over = deadline and (ready_wait_over or _over(draft, round_.quorum_s, timeouts.grace_s))
    if round_.closed_s is None and (grace_over or time_is_over(draft)):
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


def time_is_over(draft: Draft) -> bool:
    """Whether the run has lasted `max_seconds`: its round is closed at once, and is the last."""
    limit_s = draft.state.settings.max_seconds
    return limit_s > 0 and draft.elapsed_s() >= limit_s


def _close(draft: Draft, slow: tuple[PeerRecord, ...]) -> None:
    number = draft.state.round.number
    draft.set_round(closed_s=draft.now_s)
    draft.because(
        f"round {number} is closed: {listed(ids(slow))} asked to freeze and to contribute what they have"
    )
    for record in slow:
        draft.send(record.peer, Freeze(term=draft.state.term, round=number))


# ---- the plan --------------------------------------------------------------------------------------------


def plan_attempt(draft: Draft, ready: tuple[PeerRecord, ...]) -> None:
    """Plan the next attempt over `ready` members (oldest first), or skip the round.

    If somebody has to go first (other bits, no lane), nothing is planned: the caller decides over the rest.
    """
    state = draft.state
    if state.round.attempts >= state.settings.max_attempts:
        skip(draft, f"none of max_attempts = {state.settings.max_attempts} attempts succeeded")
        return
    num_members = len(state.members())
    agree_on_digest(draft, everybody=False)
    if len(draft.state.members()) < num_members:
        return
    selection = _select(draft, ready)
    if not selection.contributions:
        why = "; ".join(f"{peer}: {text}" for peer, text in selection.left_out.items())
        why = f"no member has an update ({why or 'none took a step'})"
        skip(draft, why, selection.left_out, diverging=selection.diverging)
        return
    lanes = _choose_lanes(draft, ready)
    if lanes:
        _start_attempt(draft, ready, selection, lanes)


def _select(draft: Draft, ready: tuple[PeerRecord, ...]) -> Selection:
    state = draft.state
    assert state.run_settings is not None
    return exclusion.select(
        {record.peer: record.ready for record in ready if record.ready is not None},
        state.norms,
        norm_limit=state.settings.norm_limit,
        equal=state.run_settings.get("outer.weights") == "equal",
    )


def _choose_lanes(draft: Draft, ready: tuple[PeerRecord, ...]) -> tuple[Lane, ...]:
    """Lanes that avoid the links which broke in this round; () if members had to be dropped for it."""
    members, round_ = ids(ready), draft.state.round
    broken = frozenset(edge for edge in round_.broken if edge.source in members and edge.target in members)
    dropped, lanes = draft.make_lanes(members, broken)
    if dropped and not round_.links_forgiven:
        draft.set_round(links_forgiven=True, broken=frozenset())
        draft.because("no lane avoids the broken links, they are tried once more")
        dropped, lanes = draft.make_lanes(members, frozenset())
    for record in ready:
        if record.peer in dropped:
            links = listed(f"{e.source}->{e.target}" for e in broken if record.peer in (e.source, e.target))
            reason = (
                f"no lane avoids the broken links of {record.peer} ({links}): round {round_.number} drops it"
            )
            dismiss(draft, record, "left_out", reason)
    return () if dropped else lanes


def _start_attempt(
    draft: Draft, ready: tuple[PeerRecord, ...], selection: Selection, lanes: tuple[Lane, ...]
) -> None:
    state, timeouts = draft.state, draft.timeouts
    assert state.run_settings is not None
    op = OpId(term=state.term, round=state.round.number, attempt=state.round.attempts)
    members = tuple(sorted(ids(ready)))
    contributors = tuple(each.peer for each in selection.contributions)
    plan = Plan(
        op=op,
        base_version=state.version,
        members=members,
        contributions=selection.contributions,
        ranks={record.peer: record.ranks for record in ready},
        lanes=lanes,
        codec=str(state.run_settings.get("outer.codec", "int8")),
        deadline_s=timeouts.attempt_s,
    )
    attempt = Attempt(
        plan=plan,
        incarnations={record.peer: record.incarnation for record in ready},
        left_out=selection.left_out,
        norms=selection.norms,
        due_s=draft.now_s + timeouts.attempt_s + timeouts.vote_s,
    )
    draft.set_round(attempt=attempt, attempts=state.round.attempts + 1)
    draft.journal(PlanMade(op=op, members=members, contributors=contributors))
    reason = f"attempt {op}: {listed(members)} reduce, {listed(contributors)} contribute{_absent(selection)}"
    draft.because(reason)
    draft.emit(events.AttemptStarted(op=str(op), members=members, contributors=contributors, reason=reason))
    for peer in members:
        draft.send(peer, Reduce(plan))


def _absent(selection: Selection) -> str:
    idle = f"; {listed(selection.idle)} took no step" if selection.idle else ""
    return idle + "".join(f"; {peer} is left out: {why}" for peer, why in selection.left_out.items())
