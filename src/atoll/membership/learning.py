"""What a coordinator does when its journal and the peers do not fit: learn from them, or roll the run back.

*Learn*: the journal is empty, or older than the run. A peer reports a version above the journal's; versions exist only
if they were committed, so the run stands there. Only a coordinator that has planned nothing yet learns, and only from
a peer whose version is of no older term than the journal's last plan or roll-back: that one was rolled back. Terms that
were raised and decided nothing do not count: a coordinator that dies while it learns goes on learning.

*Roll back*: the journal's newest version is held by nobody who is here, for `relearn_s`. The run goes on from the
newest version that somebody has and whose digest is the journaled one, under a new term, so that nothing said under
the old one counts any more.
"""

from __future__ import annotations

from msgspec.structs import replace

from atoll import events
from atoll.membership import leasing
from atoll.membership.catching_up import begin
from atoll.membership.coordinator_draft import Draft
from atoll.membership.coordinator_state import CatchingUp, CoordinatorState, OpenRound, PeerRecord, remember
from atoll.membership.leases import SlotTable
from atoll.membership.messages import Declare
from atoll.membership.steps import TermRaised, VersionLearned


def learn(draft: Draft, record: PeerRecord, message: Declare) -> None:
    """Take over what this declaration knows beyond the journal, if it may be believed."""
    state = draft.state
    if not state.learning:
        return
    if message.term >= state.term and not record.met_before:
        draft.journal(TermRaised(term=message.term + 1, session_key=state.session_key))
        draft.set(term=message.term + 1)
        draft.because(
            f"{record.peer} heard of term {message.term} already, so this journal is not the run's last: this is term "
            f"{message.term + 1}, and others that may know more are waited for"
        )
        _wait_for_others(draft)
        state = draft.state
    round_ = max(message.round, message.pending.round - 1 if message.pending else 0)
    newer = message.version > state.version
    later = message.version == state.version and round_ >= state.round.number
    if message.version_term < state.decided_term:
        return
    if not (newer or later):
        _learn_positions(draft, record, message)
        return
    why = (
        f"{record.peer} holds version {message.version} after round {round_}, which this coordinator's journal "
        f"(version {state.version}, round {state.round.number - 1}) does not know: learned from it"
    )
    behind = state.members() if newer else ()
    _stand_at(
        draft, message.version, round_, "", state.term, why, message.slots
    )  # of its digest the majority decides
    _wait_for_others(draft)
    for member in behind:
        held = CatchingUp(
            version=state.version,
            round=state.round.number - 1,
            digest=state.digest,
            since_s=draft.now_s,
            why=f"the run is at version {message.version}: {member.peer} catches up",
        )
        begin(draft, member, held)


def _learn_positions(draft: Draft, record: PeerRecord, message: Declare) -> None:
    """This one knows how far the data was read at the version that was learned; who was here before did not."""
    state = draft.state
    exact = message.slots is not None and message.slots.version == state.version == message.version
    if exact and state.old_positions:
        why = f"{record.peer} knows how far the data was read at version {state.version}"
        _stand_at(draft, state.version, state.round.number - 1, state.digest, state.term, why, message.slots)


def _wait_for_others(draft: Draft) -> None:
    """The journal was lost: what those know who come within `relearn_s` is not to be overtaken."""
    draft.set(relearns_until_s=draft.now_s + draft.timeouts.relearn_s)


def roll_back(draft: Draft) -> None:
    """Nobody who is here holds the newest version: wait for `relearn_s`, then go on from the newest that there is."""
    state = draft.state
    here = [] if state.members() or state.ending() else _behind(state)
    if not here:
        if state.no_holder_since_s is not None:
            draft.set(no_holder_since_s=None)
        return
    if state.no_holder_since_s is None:
        draft.set(no_holder_since_s=draft.now_s)
        return
    if draft.now_s - state.no_holder_since_s < draft.timeouts.relearn_s:
        return
    digests = state.digests()
    held_here = [record.catching_up for record in here if record.catching_up is not None]
    good = [held for held in held_here if digests.get(held.version) == held.digest]
    # A version whose digest nobody knows any more (the journal was lost) is better than none.
    good = good or [
        held for held in held_here if held.version not in digests and 0 <= held.version <= state.version
    ]
    if not good:
        return
    newest = max(good, key=lambda held: (held.version, held.round))
    why = (
        f"nobody who is here holds version {state.version} for relearn_s = {draft.timeouts.relearn_s:g} s: the run is "
        f"rolled back to version {newest.version} (round {newest.round})"
    )
    told = [held.slots for held in held_here if held.version == newest.version and held.slots is not None]
    best = max(told, key=lambda each: each.version, default=None)
    term = state.term + 1
    _stand_at(draft, newest.version, newest.round, newest.digest, term, why, best, rolled_back=True)
    for record in here:
        held = record.catching_up
        assert held is not None
        older = held.version < newest.version or (held.version, held.round) == (newest.version, newest.round)
        trusted = older and digests.get(held.version, held.digest) == held.digest
        draft.put(replace(record, catching_up=replace(held, trusted=trusted, told=None)))
    draft.set(no_holder_since_s=None, learning=False)


def _behind(state: CoordinatorState) -> list[PeerRecord]:
    return [record for record in state.peers.values() if record.catching_up is not None and record.connected]


def _stand_at(
    draft: Draft,
    version: int,
    round_: int,
    digest: str,
    term: int,
    why: str,
    slots: SlotTable | None,
    *,
    rolled_back: bool = False,
) -> None:
    """From now on, and after every restart, the run stands here; nothing said under an older term counts."""
    state = draft.state
    term = max(term, state.term)
    if term > state.term:
        draft.journal(TermRaised(term=term, session_key=state.session_key))
    draft.set(term=term)
    table = leasing.adopt(draft, version, slots)
    draft.journal(VersionLearned(version, round_, digest, why, rolled_back, table))
    draft.set(
        version=version,
        digest=digest,
        known=remember(state.known, version, round_, digest) if digest else state.known,
        round=OpenRound(number=round_ + 1),
        commit=None,
        verdict=None,
        done=False,
    )
    draft.emit(events.VersionLearned(version=version, round=round_, reason=why))
    draft.because(why)


def wanted_to_start(draft: Draft) -> int:
    """How many members begin the run; one whose version was learned goes on with fewer after `relearn_s`."""
    state, settings = draft.state, draft.state.settings
    learned = state.relearns_until_s is not None and draft.now_s >= state.relearns_until_s
    return max(1, settings.min_peers) if learned else settings.start_peers
