"""What a peer declares, held against the run: layout (by name), settings, version, digest.

The first difference is named with both sides' values, to the refused peer and in an event here. The first
declaration defines what the coordinator was not given. A process that comes back (same incarnation) resumes
where it was: it gets the verdict it lacks, or the attempt it takes part in. Whoever holds another state than the
newest is told to catch up.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from atoll import events
from atoll.membership import learning, leasing
from atoll.membership.admission import dismiss, refuse
from atoll.membership.catching_up import begin_declared, wrong_bits
from atoll.membership.coordinator_draft import Draft
from atoll.membership.coordinator_state import PeerRecord, counted, ids
from atoll.membership.differences import layout_difference, ownership_fault, settings_difference
from atoll.membership.messages import Abort, AskToLeave, Declare, Freeze, Reduce, Verdict
from atoll.membership.steps import RunDefined


def declare(draft: Draft, record: PeerRecord, message: Declare) -> None:
    refusal = _mismatch(draft, record.peer, message)
    if refusal is not None:
        refuse(draft, record, *refusal)
        return
    learning.learn(draft, record, message)
    if not _stands_with_the_run(draft, record, message):
        return
    newcomer = not record.member
    if newcomer:
        _define(draft, record.peer, message)
        draft.remove(record.peer)
    waits_in_round = message.pending is not None and message.pending.round == draft.state.round.number
    newest = message.version == draft.state.version
    draft.put(
        replace(
            record,
            member=True,
            catching_up=None,
            joined_round=draft.state.round.number
            if newcomer and draft.state.started
            else record.joined_round,
            ranks=message.ranks,
            digest=message.digest if newest else "",
            step=max(record.step, message.step),
            moved_s=draft.now_s,
            ready=message.pending if waits_in_round and newest else None,
            wish=message.wish,
            own_data=message.own_data,
        )
    )
    draft.because(
        f"{record.peer} declared version {message.version}" + (" and is ready" if waits_in_round else "")
    )
    _tell_verdicts(draft, record.peer, message)
    leasing.define(draft, message)
    if newcomer:
        leasing.compare_own(draft, record.peer, message.own_data)
    leasing.welcome(draft, record.peer, message)
    if newcomer:
        members = ids(draft.state.members())
        draft.emit(events.PeerJoined(peer=record.peer, version=message.version, members=members))
        draft.members_changed(f"{record.peer} joined: {counted(len(members), 'member')}")
    else:
        draft.send(record.peer, draft.view(f"{record.peer} is back"))
    _bring_up_to_date(draft, record, message)


def _mismatch(draft: Draft, peer: str, message: Declare) -> tuple[str, str] | None:
    """(kind, sentence) of the first difference between a declaration and the run; None if there is none."""
    state = draft.state
    if state.run_settings is not None:
        known = state.run_settings if state.layout is None else message.settings.keys()
        declared = {key: value for key, value in message.settings.items() if key in known}
        reason = settings_difference(state.run_settings, declared, f"peer {peer!r}")
        if reason is not None:
            return "settings", f"{reason}; start {peer!r} with the run's settings"
    if state.layout is not None:
        reason = layout_difference(
            state.layout, {each.name: each for each in message.layout}, f"peer {peer!r}"
        )
        if reason is not None:
            return "layout", f"{reason}; start {peer!r} with the run's model"
    numel = sum(math.prod(each.shape) for each in message.layout)
    if reason := ownership_fault(message.ranks, numel, f"peer {peer!r}"):
        return "layout", f"{reason}; start {peer!r} again, with the same version of atoll as the others"
    if reason := leasing.difference(state, message):
        return "settings", reason
    if message.version == 0 == state.version and state.digest not in ("", message.digest):
        return "digest", (
            f"peer {peer!r} starts from other weights (digest {message.digest}) than the run (digest "
            f"{state.digest}); give it the run's run.seed and the same version of the model's code"
        )
    return None


def _stands_with_the_run(draft: Draft, record: PeerRecord, message: Declare) -> bool:
    """Whether the declared state is the newest version, or short of it by a verdict that it waits for."""
    state, peer = draft.state, record.peer
    if state.ending() and not _took_part(draft, record, message):
        _refuse_latecomer(draft, record, message)
        return False
    if message.version == state.version and message.round >= state.round.number:
        where = f"{peer} knows of round {message.round} at version {message.version}, the run's last is"
        why = f"{where} {state.round.number - 1}: it comes from a history that was rolled back"
        begin_declared(draft, record, message, why, trusted=False)
        return False
    if message.version == state.version:
        if state.digest in ("", message.digest):
            return True
        record = replace(record, ranks=message.ranks)
        wrong_bits(draft, record, message.digest, held_round=message.round)
        return False
    if _lacks_commit(draft, peer, message) or _is_applying(draft, peer, message):
        return True
    if state.ending():
        reason = (
            f"the run ended at version {state.version}, without {peer}, which holds version {message.version}"
        )
        dismiss(draft, record, "left_out", reason)
        return False
    known = state.digests().get(message.version, message.digest) == message.digest
    trusted = known and message.version < state.version
    where = f"{peer} comes with version {message.version}, the run is at version {state.version}"
    begin_declared(draft, record, message, f"{where}: it catches up", trusted=trusted)
    return False


def _took_part(draft: Draft, record: PeerRecord, message: Declare) -> bool:
    """Whether this very process was a member before."""
    knows = message.round > 0 or message.version > 0 or message.pending is not None
    process = (record.peer, record.incarnation)
    return knows or record.member or any(gone.process == process for gone in draft.state.gone)


def _refuse_latecomer(draft: Draft, record: PeerRecord, message: Declare) -> None:
    state = draft.state
    late = f"the run is over, at version {state.version}: {record.peer!r} comes too late"
    refuse(draft, record, "late", late)


def _lacks_commit(draft: Draft, peer: str, message: Declare) -> bool:
    """The peer voted yes for the newest version and waits; only the verdict did not reach it."""
    commit, pending = draft.state.commit, message.pending
    return (
        commit is not None
        and pending is not None
        and (message.version, pending.round) == (commit.version - 1, commit.op.round)
        and peer in commit.members
    )


def _is_applying(draft: Draft, peer: str, message: Declare) -> bool:
    """The peer has the newest verdict and takes its outer step just now."""
    commit = draft.state.commit
    return (
        commit is not None
        and message.applying
        and message.version == commit.version - 1
        and message.round >= commit.op.round
        and peer in commit.members
    )


def _define(draft: Draft, peer: str, message: Declare) -> None:
    """The first declaration completes the settings that the coordinator has; later ones are held against
    both.
    """
    state = draft.state
    if state.layout is not None:
        return
    settings = {**message.settings, **(state.run_settings or {})}
    draft.set(layout={each.name: each for each in message.layout}, run_settings=settings)
    if state.version == 0:
        draft.set_digest(message.digest)
    draft.journal(
        RunDefined(
            layout=tuple((each.name, each.shape, each.dtype) for each in message.layout),
            settings=settings,
            digest=message.digest,
            members=(peer,),
        )
    )


def _tell_verdicts(draft: Draft, peer: str, message: Declare) -> None:
    """The verdicts that the peer may have missed; before the view, which tells that their rounds are over."""
    state = draft.state
    verdicts = (state.commit,) if state.commit is state.verdict else (state.commit, state.verdict)
    for verdict in verdicts:
        if verdict is not None and _lacks(message, verdict):
            draft.send(peer, verdict)


def _bring_up_to_date(draft: Draft, record: PeerRecord, message: Declare) -> None:
    """Send again what the peer may have missed of the open round: the attempt it is in, a request to freeze."""
    state, peer = draft.state, record.peer
    attempt = state.round.attempt
    if (
        attempt is not None
        and peer not in attempt.votes
        and attempt.incarnations.get(peer) == record.incarnation
    ):
        op = attempt.plan.op
        draft.send(peer, Abort(op, attempt.failed) if attempt.failed else Reduce(attempt.plan))
    if state.round.closed_s is not None and message.pending is None:
        draft.send(peer, Freeze(term=state.term, round=state.round.number))
    if record.leaving:
        draft.send(peer, AskToLeave(record.leaving))


def _lacks(message: Declare, verdict: Verdict) -> bool:
    """Who waits in a round has to hear its verdict, and everybody the last one.

    Otherwise a peer in LOCAL reads the round's number from the view.
    """
    return message.round < verdict.op.round and (message.pending is not None or verdict.ends)
