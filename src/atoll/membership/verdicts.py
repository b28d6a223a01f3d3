"""How attempts and rounds end: votes, failures, and the one verdict of each round.

An attempt is committed once every living member of its plan voted yes with one digest. Otherwise it has
failed: the others are told to give it up, and once all have answered, or are lost, the next attempt may be
planned. If the results differ the attempt is repeated once, then the odd ones out go. A member that voted yes
and was lost keeps its vote: should it come back it gets the verdict.

The commit line is `_conclude`: the verdict is journaled before it is sent to anybody. A run in which nobody's
update was finite for DIVERGED_ROUNDS rounds in a row is over: the anchor does not get better by waiting.
"""

from __future__ import annotations

from msgspec.structs import replace

from atoll import events
from atoll.membership import exclusion, leasing, reach, saving
from atoll.membership.admission import dismiss, end_run, lose
from atoll.membership.catching_up import left_behind, start_over
from atoll.membership.coordinator_draft import Draft
from atoll.membership.coordinator_state import Attempt, OpenRound, PeerRecord, ids, listed, majority
from atoll.membership.exclusion import remember_norms
from atoll.membership.messages import Abort, Verdict, Vote
from atoll.membership.pacing import steps_by_speed
from atoll.membership.rates import learn
from atoll.membership.steps import VerdictMade
from atoll.values import OpId

DIVERGED_ROUNDS = 3


def record_vote(draft: Draft, record: PeerRecord, message: Vote) -> None:
    attempt = draft.state.round.attempt
    if (
        attempt is None
        or message.op != attempt.plan.op
        or attempt.incarnations.get(record.peer) != record.incarnation
    ):
        draft.because(f"ignored a vote of {record.peer} on {message.op}, which is not the attempt under way")
        return
    if record.peer in attempt.votes:
        return
    first_yes = message.ok and not attempt.failed and not any(vote.ok for vote in attempt.votes.values())
    due_s = min(attempt.due_s, draft.now_s + draft.timeouts.vote_s) if first_yes else attempt.due_s
    draft.set_attempt(votes={**attempt.votes, record.peer: message}, due_s=due_s)
    answer = "yes" if message.ok else f"no: {message.reason}"
    draft.because(f"{record.peer} voted {answer}")


def settle_attempt(draft: Draft) -> None:
    """Decide about the attempt under way, if its votes, losses or deadlines decide it."""
    attempt = draft.state.round.attempt
    if attempt is None:
        return
    waiting, absent = _not_voted(draft, attempt)
    if attempt.failed:
        _await_answers(draft, attempt, waiting)
        return
    op = attempt.plan.op
    noes = {peer: vote for peer, vote in attempt.votes.items() if not vote.ok}
    if noes:
        _fail(draft, waiting, "; ".join(f"{peer} says: {vote.reason}" for peer, vote in sorted(noes.items())))
    elif absent and waiting:
        _fail(draft, waiting, f"{listed(absent)} is gone before it voted")
    elif waiting:
        if draft.now_s >= attempt.due_s:
            _fail(draft, waiting, f"{listed(waiting)} did not vote in time")
    elif sum(peer in draft.state.peers for peer in attempt.votes) < draft.state.settings.min_peers:
        _fail(draft, waiting, f"fewer than min_peers = {draft.state.settings.min_peers} of its members live")
    elif len({vote.digest for vote in attempt.votes.values()}) > 1:
        _settle_difference(draft, attempt)
    else:
        commit(draft, attempt, f"all living members of {op} hold the same result")


def _not_voted(draft: Draft, attempt: Attempt) -> tuple[list[str], list[str]]:
    """Planned members without a vote: those that live, and those that are gone or another process now."""
    waiting, absent = [], []
    votes, peers = attempt.votes, draft.state.peers
    for peer in [each for each in attempt.incarnations if each not in votes]:
        record = peers.get(peer)
        lives = record is not None and record.member and record.incarnation == attempt.incarnations[peer]
        (waiting if lives else absent).append(peer)
    return waiting, absent


def _fail(draft: Draft, waiting: list[str], why: str) -> None:
    attempt = draft.state.round.attempt
    assert attempt is not None
    op = attempt.plan.op
    draft.set_attempt(failed=why, due_s=draft.now_s + draft.timeouts.vote_s)
    draft.emit(events.AttemptFailed(op=str(op), reason=why))
    draft.because(f"attempt {op} failed: {why}")
    for peer in waiting:
        draft.send(peer, Abort(op=op, reason=why))


def give_up(draft: Draft, why: str) -> None:
    """Fail the attempt under way, if there is one that could still be committed."""
    attempt = draft.state.round.attempt
    if attempt is not None and not attempt.failed:
        waiting, _ = _not_voted(draft, attempt)
        _fail(draft, waiting, why)


def _await_answers(draft: Draft, attempt: Attempt, waiting: list[str]) -> None:
    """After a failure: once all have answered, note the broken links and make room for a new attempt."""
    if waiting and draft.now_s < attempt.due_s:
        return
    for peer in waiting:
        why = f"it did not answer the end of {attempt.plan.op} within vote_s = {draft.timeouts.vote_s:g} s"
        lose(draft, draft.state.peers[peer], why)
    broken = frozenset(edge for vote in attempt.votes.values() for edge in vote.broken)
    draft.set_round(attempt=None, broken=draft.state.round.broken | broken)
    reach.round_broke(draft, broken)


def _settle_difference(draft: Draft, attempt: Attempt) -> None:
    digests = {peer: attempt.votes[peer].digest for peer in attempt.incarnations if peer in attempt.votes}
    held = ", ".join(f"{peer}: {digest}" for peer, digest in sorted(digests.items()))
    if not draft.state.round.results_differed:
        draft.set_round(results_differed=True)
        _fail(draft, [], f"the results differ ({held}); the attempt is repeated once")
        return
    agreed = majority(digests.values())
    _fail(draft, [], f"the results differ again ({held})")
    for peer, digest in digests.items():
        record = draft.state.peers.get(peer)
        if digest != agreed and record is not None:
            what = (
                f"{peer} got other results than the others twice in round {attempt.plan.op.round} "
                f"({digest}, not {agreed})"
            )
            start_over(draft, record, what, held_round=attempt.plan.op.round - 1)


# ---- the round's end -------------------------------------------------------------------------------------


def commit(draft: Draft, attempt: Attempt, reason: str) -> None:
    """Everybody who lives holds the result: the round is committed, for those who voted."""
    state, plan = draft.state, attempt.plan
    voters = tuple(peer for peer in plan.members if peer in attempt.votes)
    contributors = tuple(each.peer for each in plan.contributions)
    verdict = Verdict(
        op=plan.op,
        outcome="committed",
        version=state.version + 1,
        digest=attempt.votes[voters[0]].digest,
        contributions=plan.contributions,
        members=voters,
        left_out=attempt.left_out,
        reason=f"round {plan.op.round} is committed as version {state.version + 1}: {reason}; "
        f"{listed(contributors)} contributed",
        saves=saving.is_due(draft, state.version + 1),
        uploader=saving.uploader(state, voters),
    )
    draft.set(version=verdict.version, digest="", norms=remember_norms(state.norms, attempt.norms))
    _conclude(draft, verdict, attempt.norms)
    draft.emit(
        events.RoundCommitted(
            round=plan.op.round,
            version=verdict.version,
            op=str(plan.op),
            members=voters,
            contributors=contributors,
            weights=tuple(each.weight for each in plan.contributions),
            result_digest=verdict.digest,
            reason=verdict.reason,
        )
    )
    _learn_rates(draft, attempt)


def _learn_rates(draft: Draft, attempt: Attempt) -> None:
    """What the members' engines saw on the way to a commit; an attempt that failed says little of its links."""
    reports = {peer: vote.stats.links for peer, vote in attempt.votes.items()}
    number, members = attempt.plan.op.round, ids(draft.state.members())
    rates, changed = learn(draft.state.rates, reports, number, members)
    draft.set(rates=rates)
    reach.learn_used(draft, reports)
    if changed:
        draft.emit(events.RatesMeasured(round=number, links=changed))


def skip(draft: Draft, why: str, left_out: dict[str, str] | None = None, *, diverging: bool = False) -> None:
    """The round ends without a new version: the anchor stays, the next update covers both rounds.

    `diverging`: because no update was finite. That ends the run if it goes on.
    """
    state = draft.state
    number = state.round.number
    verdict = Verdict(
        op=OpId(term=state.term, round=number, attempt=state.round.attempts),
        outcome="skipped",
        version=state.version,
        digest="",
        contributions=(),
        members=tuple(sorted(ids(state.members()))),
        left_out=left_out or {},
        reason=f"round {number} is skipped: {why}; the next update covers both rounds",
    )
    diverging_rounds = state.diverging_rounds + 1 if diverging else 0
    _conclude(draft, verdict, (), diverging_rounds)
    draft.emit(events.RoundSkipped(round=number, reason=verdict.reason))
    if diverging_rounds >= DIVERGED_ROUNDS:
        reason = (
            f"the run diverged at version {state.version}: no update was finite for {diverging_rounds} rounds "
            "in a row; begin a new run with a lower learning rate (inner.lr), or look at the data"
        )
        end_run(draft, "diverged", reason, 7)


def _next_steps(draft: Draft, verdict: Verdict) -> dict[str, int]:
    members = [record for record in draft.state.members() if record.peer in verdict.members]
    return steps_by_speed({each.peer: each.ready for each in members if each.ready is not None})


def _unleased(draft: Draft, verdict: Verdict) -> frozenset[str]:
    """Who is left out only because its leases went to others: that is no offence."""
    readies = {each.peer: each.ready for each in draft.state.members() if each.ready is not None}
    return frozenset(leasing.broken(draft.state, readies)) & verdict.left_out.keys()


def _conclude(draft: Draft, verdict: Verdict, norms: tuple[float, ...], diverging_rounds: int = 0) -> None:
    state, committed = draft.state, verdict.outcome == "committed"
    if why := draft.why_last():
        verdict = replace(verdict, ends=True, end_reason=why)
    elif (state.run_settings or {}).get("outer.steps_by_speed"):
        verdict = replace(verdict, inner_steps=_next_steps(draft, verdict))
    unleased = _unleased(draft, verdict)
    slots, read = leasing.conclude(draft, verdict, state.round.attempt)
    verdict = replace(verdict, slots=slots)
    draft.journal(
        VerdictMade(
            verdict=verdict,
            norms=norms,
            elapsed_s=draft.elapsed_s(),
            diverging_rounds=diverging_rounds,
        )
    )
    # ---- commit line: the verdict is on disk and is never taken back ----
    draft.because(verdict.reason + (f"; {verdict.end_reason}" if verdict.ends else ""))
    draft.set(
        verdict=verdict,
        commit=verdict if committed else state.commit,
        round=OpenRound(number=verdict.op.round + 1),
        diverging_rounds=diverging_rounds,
        saved_at_s=draft.elapsed_s() if verdict.saves else state.saved_at_s,
        slots=verdict.slots,
        tables=leasing.remember(state.tables, verdict.slots if committed else None),
    )
    on_probation = exclusion.probation(state.offences, verdict.op.round)
    draft.set(
        offences=exclusion.remember_offences(
            state.offences, verdict.left_out.keys() - on_probation.keys() - unleased, verdict.op.round
        )
    )
    if read is not None:
        draft.emit(read)
    for peer, why in verdict.left_out.items():
        draft.emit(events.PeerLeftOut(peer=peer, round=verdict.op.round, reason=why))
    for record in state.members():
        if record.peer in verdict.members:
            draft.put(
                replace(record, ready=None, moved_s=draft.now_s, digest="" if committed else record.digest)
            )
            draft.send(record.peer, verdict)
        elif verdict.ends:
            reason = f"the run ended with round {verdict.op.round}, in which {record.peer} did not take part"
            dismiss(draft, record, "left_out", reason)
        elif committed:
            left_behind(draft, record)
