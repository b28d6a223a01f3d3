"""Who still lives, by the coordinator's own clock, and whether enough do.

A member is lost when it was not heard for `dead_s`; when its connection closed and it did not come back
within one `heartbeat_s` (a killed process closes its sockets at once, so this is how kills are noticed fast);
or when its inner step did not move for `stall_s` while it should train. Losing a peer that still lives costs
it nothing until the others commit without it: it declares again and goes on. Members that a restarted
coordinator waits for get the time that connecting may take.

A silence between two events that is longer than a heartbeat is the coordinator's own pause. It counts as no
time at all, and all peers get a fresh timeout.
"""

from __future__ import annotations

from msgspec.structs import replace

from atoll.membership.admission import end_run, lose
from atoll.membership.coordinator_draft import Draft
from atoll.membership.coordinator_state import CoordinatorState, PeerRecord, counted, listed
from atoll.membership.settings import Timeouts


def pass_time(state: CoordinatorState, now_s: float) -> tuple[CoordinatorState, float]:
    """Take note of the clock; returns the state and the time to decide by, without our own pauses."""
    gap_s = now_s - state.last_s
    if gap_s <= state.settings.timeouts.heartbeat_s:
        return replace(state, last_s=now_s), now_s - state.paused_s
    paused_s = state.paused_s + gap_s
    fresh_s = now_s - paused_s
    peers = {
        peer: replace(record, heard_s=fresh_s, dropped_s=fresh_s, moved_s=fresh_s)
        for peer, record in state.peers.items()
    }
    return replace(state, last_s=now_s, paused_s=paused_s, peers=peers), fresh_s


def lose_silent(draft: Draft) -> None:
    for record in tuple(draft.state.peers.values()):
        why = silence(draft, record)
        if why:
            lose(draft, record, why)


def silence(draft: Draft, record: PeerRecord) -> str:
    """Why this peer counts as lost now, in words; "" while it does not."""
    timeouts, now_s = draft.timeouts, draft.now_s
    if not record.connected:
        if now_s - record.dropped_s < absence_allowed_s(timeouts, record):
            return ""
        if not record.incarnation:
            return "it did not come back to the restarted coordinator"
        return f"its connection closed and it was not back within {timeouts.heartbeat_s:g} s"
    if now_s - record.heard_s >= timeouts.dead_s:
        return f"no sign of life for dead_s = {timeouts.dead_s:g} s"
    trains = draft.state.started and record.member and record.incarnation and record.ready is None
    if trains and now_s - record.moved_s >= timeouts.stall_s:
        return f"its inner step stays at {record.step} for stall_s = {timeouts.stall_s:g} s"
    return ""


def absence_allowed_s(timeouts: Timeouts, record: PeerRecord) -> float:
    if not record.incarnation:
        return max(timeouts.connect_s, timeouts.dead_s)
    return min(timeouts.heartbeat_s, timeouts.dead_s)


def watch_quorum(draft: Draft) -> None:
    """Too few members: wait `quorum_wait_s` for others to come, then end the run."""
    state = draft.state
    members = state.members()
    if not state.started and not members:
        return
    if len(members) >= _needed(state):
        if state.short_since_s is not None:
            draft.set(short_since_s=None)
    elif state.short_since_s is None:
        draft.set(short_since_s=draft.now_s)
    elif draft.now_s - state.short_since_s >= draft.timeouts.quorum_wait_s:
        _end_without_quorum(draft, members)


def _needed(state: CoordinatorState) -> int:
    """How many members the run needs now. After its last round, or when the others were done, one that is
    still to say that it is done is enough, unless it waits for a round.
    """
    if state.ending() or (state.done and not any(record.ready is not None for record in state.members())):
        return 1
    return state.settings.min_peers if state.started else state.settings.start_peers


def _end_without_quorum(draft: Draft, members: tuple[PeerRecord, ...]) -> None:
    state, waited = draft.state, f"quorum_wait_s = {draft.timeouts.quorum_wait_s:g} s"
    key = "min_peers" if state.started else "start_peers"
    reason = (
        f"only {counted(len(members), 'member')} ({listed(record.peer for record in members)}) for {waited}, "
        f"{key} is {_needed(state)}; start more peers or lower {key}"
    )
    if state.ending():
        reason = f"all peers were lost after the last round, and none came back to be done within {waited}"
    end_run(draft, "quorum", reason, 6)
