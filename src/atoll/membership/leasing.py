"""The coordinator's part in leasing data slots: when they are leased, come back, and are committed.

The table goes with every verdict: with it the positions of what was read are committed, and all that the round's
members hold is shared out anew. Within a round there are few reasons to change it: the run starts, a peer joins or is
back, one runs dry, one is gone. What a peer has read stays its own while an attempt may still commit it.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from atoll import events
from atoll.membership import leases
from atoll.membership.coordinator_draft import Draft
from atoll.membership.coordinator_state import Attempt, CoordinatorState, PeerRecord, listed
from atoll.membership.leases import Reads, SlotTable
from atoll.membership.messages import Declare, Leases, Ready, SlotsWanted, Verdict
from atoll.membership.steps import LeasesChanged

MOST_SLOTS = 1 << 20
"""As many as data.slots allows. Before memory is taken for what a peer tells."""
_TABLES_REMEMBERED = 16


def difference(state: CoordinatorState, message: Declare) -> str:
    """Why a declared text is not the run's, "" if it may be."""
    if not 0 <= message.num_slots <= MOST_SLOTS:
        return f"its text has {message.num_slots} data slots; 0 to {MOST_SLOTS} can be leased"
    if message.slots is not None and (why := leases.contradiction(message.slots, message.num_slots)):
        return f"what it holds of the data contradicts itself: {why}"
    if state.slots is None or not message.num_slots or message.num_slots == state.slots.count:
        return ""
    return f"its text has {message.num_slots} data slots, the run's has {state.slots.count}; give it the run's text"


def define(draft: Draft, message: Declare) -> None:
    """The first peer that needs leases tells how many slots there are. Nothing of them is read."""
    state = draft.state
    if not message.num_slots or state.slots is not None:
        return
    seed = int((state.run_settings or {}).get("run.seed") or 0)
    draft.set(slots=SlotTable(count=message.num_slots, seed=seed, version=state.version))
    if state.version:
        draft.set(old_positions=True)
        _tell_old(draft, state.version, 0)


def compare_own(draft: Draft, peer: str, digest: str) -> None:
    """Peers that should each read their own data, and read the same: most likely by mistake."""
    same = [
        each.peer
        for each in draft.state.peers.values()
        if digest and each.own_data == digest and each.peer != peer
    ]
    if same:
        reason = (
            f"{peer} reads the same data as {listed(same)}, although data.scope is own: if it is one text for all, set "
            "data.scope = shared, and it is shared out"
        )
        draft.emit(events.SameDataRead(peers=tuple(sorted((peer, *same))), reason=reason))
        draft.because(reason)


# ---- within a round ------------------------------------------------------------------------------------------------


def welcome(draft: Draft, peer: str, message: Declare | None = None) -> None:
    """This peer is a member now, or is back: what it may have read in is its own again as far as nobody touched it."""
    state = draft.state
    if state.slots is None:
        return
    draft.set(returning=tuple(each for each in state.returning if each != peer))
    table = leases.reclaim(state.slots, peer, message.leases) if message and message.leases else state.slots
    if state.started:
        table = leases.top_up(table, {peer: _wish(state.peers[peer], table)})
    _change(draft, table)
    _tell(draft, peer)


def start(draft: Draft) -> None:
    """The run starts: all get their slots, in the order of their ids."""
    state = draft.state
    if state.slots is None:
        return
    wishes = {record.peer: _wish(record, state.slots) for record in state.members()}
    absent = tuple(peer for peer in state.slots.leases if peer not in state.peers)
    draft.set(returning=tuple(dict.fromkeys((*state.returning, *absent))))
    take_back(draft)
    _change(draft, leases.top_up(draft.state.slots or state.slots, wishes))
    for peer in wishes:
        _tell(draft, peer)


def hear_wanted(draft: Draft, record: PeerRecord, message: SlotsWanted) -> None:
    """A peer runs dry before the round ends."""
    table = draft.state.slots
    if table is None:
        draft.because(f"ignored that {record.peer} wants data slots: this run leases none")
        return
    before = len(table.held(record.peer))
    more = max(0, min(message.more, table.count))
    _change(draft, leases.top_up(table, {record.peer: before + more}))
    assert draft.state.slots is not None
    leased = len(draft.state.slots.held(record.peer)) - before
    draft.because(f"{record.peer} wants {more} more data slots and gets {leased}")
    draft.send(record.peer, Leases(draft.state.slots, message.number))


def take_back(draft: Draft) -> None:
    """What peers held that are gone is free, unless an attempt may still commit what they read of it."""
    state, attempt = draft.state, draft.state.round.attempt
    if not state.returning or state.slots is None or not state.started:
        return
    if state.relearns_until_s is not None and draft.now_s < state.relearns_until_s:
        return
    busy = attempt.reads if attempt is not None and not attempt.failed else {}
    going = [peer for peer in state.returning if peer not in busy]
    if not going:
        return
    draft.set(returning=tuple(peer for peer in state.returning if peer in busy))
    _change(draft, leases.give_back(state.slots, going))
    for peer in going:
        if held := state.slots.held(peer):
            draft.emit(events.SlotsReturned(peer=peer, slots=len(held)))


def _wish(record: PeerRecord, table: SlotTable) -> int:
    return max(0, min(record.wish, table.count))


def _change(draft: Draft, table: SlotTable) -> None:
    """Journal and take over a table that is another one; whom it concerns has to be told."""
    before = draft.state.slots
    assert before is not None
    if table == before:
        return
    table = _stamped(draft, table, draft.state.version)
    changed = {peer: held for peer, held in table.leases.items() if before.held(peer) != held}
    returned = tuple(peer for peer in before.leases if peer not in table.leases)
    draft.journal(LeasesChanged(replace(table, leases=changed), returned))
    draft.set(slots=table)
    for peer, held in changed.items():
        draft.emit(events.SlotsLeased(peer=peer, slots=len(held), before=len(before.held(peer))))


def _tell(draft: Draft, peer: str) -> None:
    assert draft.state.slots is not None
    draft.send(peer, Leases(draft.state.slots))


def _stamped(draft: Draft, table: SlotTable, version: int) -> SlotTable:
    return replace(table, stamp=(draft.state.term, table.stamp[1] + 1), version=version)


def changed(table: SlotTable | None, record: LeasesChanged) -> SlotTable:
    """The table after a journaled change."""
    held = {} if table is None else table.leases
    kept = {peer: each for peer, each in held.items() if peer not in record.returned}
    return replace(record.slots, leases={**kept, **record.slots.leases})


# ---- at a verdict --------------------------------------------------------------------------------------------------


def broken(state: CoordinatorState, readies: Mapping[str, Ready]) -> dict[str, str]:
    """Who read what is not leased to it, and why it was not."""
    if state.slots is None:
        return {}
    return leases.broken(state.slots, {peer: ready.reads for peer, ready in readies.items()})


def conclude(
    draft: Draft, verdict: Verdict, attempt: Attempt | None
) -> tuple[SlotTable | None, events.SlotsRead | None]:
    """The table with which the round ends, and what is to be told once that is journaled."""
    state = draft.state
    if state.slots is None:
        return None, None
    living = {record.peer: record for record in state.members() if record.peer in verdict.members}
    if verdict.outcome == "committed" and attempt is not None:
        read = _read(verdict, attempt)
        settled = {peer: read.get(peer, ()) for peer in attempt.incarnations}
        wishes = {peer: _wish(record, state.slots) for peer, record in living.items()}
        table = leases.settle(state.slots, settled, wishes)
        counted = {each.peer for each in verdict.contributions}
    else:
        readies = {peer: record.ready for peer, record in living.items() if record.ready is not None}
        unleased = broken(state, readies)
        read = {
            peer: ready.reads
            for peer, ready in readies.items()
            if peer in verdict.left_out and peer not in unleased
        }
        more = {peer: leases.finished(ready.reads) for peer, ready in readies.items() if peer not in read}
        wishes = {peer: _wish(record, state.slots) + more.get(peer, 0) for peer, record in living.items()}
        table, counted = leases.drop(state.slots, read, wishes), set[str]()
    return _stamped(draft, table, verdict.version), _what_was_read(verdict, read, counted)


def _read(verdict: Verdict, attempt: Attempt) -> dict[str, Reads]:
    """What is read for good: by contributors, and by members whose work is dropped. A member that is gone and did not
    contribute takes its work along."""
    counted = {each.peer for each in verdict.contributions}
    return {
        peer: reads
        for peer, reads in attempt.reads.items()
        if peer in counted or (peer in verdict.members and peer not in attempt.unleased)
    }


def _what_was_read(verdict: Verdict, read: Mapping[str, Reads], counted: set[str]) -> events.SlotsRead | None:
    told = {
        peer: tuple((each.slot, *each.start, *each.end) for each in reads)
        for peer, reads in read.items()
        if reads
    }
    if not told:
        return None
    return events.SlotsRead(
        round=verdict.op.round,
        version=verdict.version,
        committed={peer: reads for peer, reads in told.items() if peer in counted},
        dropped={peer: reads for peer, reads in told.items() if peer not in counted},
    )


def remember(tables: tuple[SlotTable, ...], table: SlotTable | None) -> tuple[SlotTable, ...]:
    """The tables of the last commits, for a run that is rolled back."""
    if table is None:
        return tables
    older = tuple(each for each in tables if each.version < table.version)
    return (*older, table)[-_TABLES_REMEMBERED:]


# ---- at another version --------------------------------------------------------------------------------------------


def adopt(draft: Draft, version: int, told: SlotTable | None) -> SlotTable | None:
    """The run stands at `version` now, by what the peers know; `told` is what they know of its data.

    Nobody is told here. Members that train already, by an older table, hear of this one as the run starts, when they
    come back or ask for more, or with the next verdict. What they read meanwhile does no harm: a slot that does not
    stand where they began, or is another's now, makes their work of this round not count (`broken`), and to tell them
    earlier would not save it.
    """
    state = draft.state
    known = [each for each in (told, *reversed(state.tables), state.slots) if each is not None]
    exact = [each for each in known if each.version == version]
    older = sorted((each for each in known if each.version < version), key=lambda each: -each.version)
    if not known:
        return None
    found = (exact or older or known)[0]
    if not exact:
        _tell_old(draft, version, found.version)
    number = max(each.stamp[1] for each in known)
    table = _stamped(draft, replace(found, stamp=(0, number)), version)
    absent = tuple(peer for peer in table.leases if peer not in state.peers)
    draft.set(slots=table, tables=remember((), table), returning=absent, old_positions=not exact)
    return table


def _tell_old(draft: Draft, version: int, positions_of: int) -> None:
    reason = (
        f"nobody who is here knows how far the data was read at version {version}: it is read on from where "
        f"version {positions_of} stood"
    )
    draft.emit(events.OldPositionsUsed(version=version, positions_of=positions_of, reason=reason))
    draft.because(reason)
