"""How peers come and go: arrive, drop, leave, be lost, be refused, be told that the run went on without them.

A new process under a known id fences the old one: its messages have no effect from then on. What a peer that arrived
has to say before it is a member is in `declaration`.
"""

from __future__ import annotations

from msgspec.structs import replace

from atoll import events
from atoll.membership.coordinator_draft import Draft
from atoll.membership.coordinator_state import CoordinatorState, PeerRecord, ids, listed
from atoll.membership.messages import Ended, Leave, Refused
from atoll.membership.steps import PeerArrived, PeerDropped


def refusal(state: CoordinatorState, peer: str, incarnation: str, now_s: float) -> str:
    """Why a process may not have this name now, in a sentence; "" if it may."""
    if evicted := state.eviction(peer, now_s):
        return evicted
    if state.is_fenced(peer, incarnation):
        return f"a newer process takes part as {peer!r}; give every peer its own name (local.peer)"
    return ""


def arrive(draft: Draft, event: PeerArrived) -> None:
    """A connection proved the token. Whose name it may not have stays outside; otherwise a new process fences
    the old.
    """
    peer, now_s = event.peer, draft.now_s
    reason = refusal(draft.state, peer, event.incarnation, now_s)
    if reason:
        draft.close(PeerRecord(peer=peer, incarnation=event.incarnation, heard_s=now_s))
        draft.emit(events.PeerRefused(peer=peer, reason=reason))
        draft.because(f"refused a process from {event.address}: {reason}")
        return
    draft.emit(events.PeerConnected(peer=peer, address=event.address))
    record = draft.state.peers.get(peer)
    if record is not None and record.incarnation not in ("", event.incarnation):
        fence(draft, record, f"{peer} started again, from {event.address}: its old process is fenced")
        record = None
    process = (peer, event.incarnation)
    again = process in draft.state.met
    if draft.state.learning and not again:
        draft.set(met=(*draft.state.met, process))
    if record is None:
        draft.fence_gone(peer, event.incarnation)
        draft.put(
            PeerRecord(
                peer=peer, incarnation=event.incarnation, heard_s=now_s, moved_s=now_s, met_before=again
            )
        )
        draft.because(f"{peer} connected from {event.address}; it is a member once it has declared")
    else:
        back = replace(record, incarnation=event.incarnation, connected=True, heard_s=now_s, met_before=again)
        draft.put(back)
        draft.because(f"{peer} is back from {event.address}")


def fence(draft: Draft, record: PeerRecord, reason: str) -> None:
    """A newer process has the id: the old one's messages have no effect from now on, its votes neither."""
    draft.close(record)
    draft.remove(record.peer, fenced=True)
    attempt = draft.state.round.attempt
    if attempt is not None and record.peer in attempt.votes:
        draft.set_attempt(votes={peer: vote for peer, vote in attempt.votes.items() if peer != record.peer})
    draft.because(reason)
    if record.member:
        draft.emit(events.PeerLost(peer=record.peer, reason=reason, members=ids(draft.state.members())))
        draft.members_changed(reason)


def drop(draft: Draft, record: PeerRecord, event: PeerDropped) -> None:
    """The connection closed; how long it may stay away is decided by `liveness`."""
    if not record.member:
        draft.remove(record.peer)
        draft.because(f"{event.peer} hung up before it was a member")
        return
    draft.put(replace(record, connected=False, dropped_s=draft.now_s))
    draft.because(
        f"the connection of {event.peer} closed; it may come back within {draft.timeouts.heartbeat_s:g} s"
    )


def leave(draft: Draft, record: PeerRecord, message: Leave) -> None:
    draft.close(record)
    draft.remove(record.peer, done=message.done or draft.state.ending())
    if not record.member:
        draft.because(f"{record.peer} left before it was a member: {message.reason}")
        return
    reason = f"{record.peer} left: {message.reason}"
    draft.because(reason)
    draft.emit(events.PeerLeft(peer=record.peer, reason=message.reason, members=ids(draft.state.members())))
    draft.members_changed(reason)
    if draft.state.started and not draft.state.members() and not draft.state.done:
        over = f"all peers left and the last, {record.peer}, was not done: {message.reason}"
        if behind := [each.peer for each in draft.state.peers.values() if each.catching_up is not None]:
            over += f"; {listed(behind)} had not caught up, and nobody is left to give the run's state: start all again"
        end_run(draft, "quorum", over, 6)


def lose(draft: Draft, record: PeerRecord, why: str) -> None:
    """The peer is no member any more. If its process still lives it may declare again.

    After the run's last round its goodbye may be all that is missing: if another one said that it was done, the run is.
    """
    draft.close(record)
    draft.remove(record.peer, done=draft.state.ending() and draft.state.done)
    if not record.member and record.catching_up is None:
        draft.because(f"{record.peer} is gone before it declared: {why}")
        return
    reason = f"lost {record.peer}: {why}"
    draft.because(reason)
    draft.emit(events.PeerLost(peer=record.peer, reason=why, members=ids(draft.state.members())))
    if record.member:
        draft.members_changed(reason)


def dismiss(draft: Draft, record: PeerRecord, kind: str, reason: str) -> None:
    """Tell a member that the run goes on without it, or is over, and forget it."""
    draft.send(record.peer, Ended(kind=kind, reason=reason))
    draft.close(record)
    draft.remove(record.peer)
    draft.because(reason)
    if record.member:
        draft.emit(events.PeerLost(peer=record.peer, reason=reason, members=ids(draft.state.members())))
        draft.members_changed(reason)


def end_run(draft: Draft, kind: str, reason: str, exit_code: int) -> None:
    """Tell all peers that the run is over, and why; the coordinator's work is over too."""
    for record in draft.state.peers.values():
        draft.send(record.peer, Ended(kind=kind, reason=reason))
        draft.close(record)
    draft.finish(reason, exit_code)


def refuse(draft: Draft, record: PeerRecord, kind: str, reason: str) -> None:
    draft.send(record.peer, Refused(kind=kind, reason=reason))
    draft.close(record)
    draft.remove(record.peer)
    draft.emit(events.PeerRefused(peer=record.peer, reason=reason))
    draft.because(f"refused {record.peer}: {reason}")
    if record.member:
        draft.members_changed(f"{record.peer} was refused")
