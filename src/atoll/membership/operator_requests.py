"""What an operator may order, decided: stop the run, ask a peer to leave, evict a peer.

*Stop*: the open round is closed at once and is the last; its verdict ends the run for everybody. Where no round can be
committed any more (too few members, nobody answers), the run ends at the version it has. *Leave* is polite: the peer
says goodbye at its next safe point. *Evict* is not: the peer is cut off, an attempt that its update is in is given up,
and its id stays outside. A stop and an eviction are journaled: a restarted coordinator keeps to them.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from atoll import events
from atoll.membership import verdicts
from atoll.membership.coordinator_draft import Draft
from atoll.membership.coordinator_state import Eviction, PeerRecord, ids, listed
from atoll.membership.messages import AskToLeave, Ended, Refused, SessionKey
from atoll.membership.operator import Done, EvictPeer, LeavePeer, OperatorOrder, StopRun
from atoll.membership.steps import Answer, EvictionDecided, OperatorSaid, StopDecided

MAX_REASON_CHARS = 500


def hear(draft: Draft, event: OperatorSaid) -> None:
    """Decide about a request, and answer it."""
    request = event.request
    nonsense = _nonsense(request)
    done = Done(False, nonsense) if nonsense else _obey(draft, event)
    draft.because(f"an operator asked: {done.reason}")
    draft.effects.append(Answer(event.ticket, done))


def _nonsense(request: OperatorOrder) -> str:
    """What cannot be meant so, in a sentence: it comes from outside, and a reason is shown on terminals."""
    if len(request.reason) > MAX_REASON_CHARS or not request.reason.isprintable():
        return f"a reason is one line of at most {MAX_REASON_CHARS} printable characters"
    if isinstance(request, EvictPeer) and not 0 <= request.for_s < math.inf:
        return f"an eviction cannot last {request.for_s:g} s"
    return ""


def _obey(draft: Draft, event: OperatorSaid) -> Done:
    match event.request:
        case StopRun(reason=reason):
            return _stop(draft, reason)
        case LeavePeer(peer=peer, reason=reason):
            return _ask_to_leave(draft, peer, reason)
        case EvictPeer() as request:
            return _evict(draft, request, event.spare_key, event.certified)


# ---- stop ------------------------------------------------------------------------------------------------


def _stop(draft: Draft, reason: str) -> Done:
    state = draft.state
    if state.ending():
        assert state.verdict is not None
        left = listed(ids(state.members()))
        return Done(
            True, f"the run is over already ({state.verdict.end_reason}); waiting for {left} to leave"
        )
    if state.stopping:
        return Done(True, f"round {state.round.number} is the last already: {state.stopping}")
    why = _with_reason("the run was stopped by an operator", reason)
    draft.set(stopping=why)
    draft.journal(StopDecided(why))
    draft.emit(events.RunStopped(why))
    if not state.started:
        return Done(True, "the run had not started; it is over, and all peers are sent away")
    if not state.members():
        return Done(True, f"the run had no member left; it is over at version {state.version}")
    if state.round.attempt is None and len(state.members()) < state.settings.min_peers:
        return Done(
            True, f"too few members are left for another round; the run ends at version {state.version}"
        )
    return Done(True, f"round {state.round.number} is the last: it is closed now, and ends the run")


def settle_stop(draft: Draft) -> None:
    """End a run that is to stop and can commit nothing more; otherwise its round goes on to its verdict."""
    state = draft.state
    if not state.stopping or state.over or state.ending():
        return
    members = state.members()
    if not (state.started and members):
        _end_at_once(draft)
    elif state.round.attempt is None and len(members) < state.settings.min_peers:
        verdicts.skip(draft, f"fewer than min_peers = {state.settings.min_peers} members are left to end it")
    elif state.round.attempt is None and _nobody_froze(draft, members):
        freeze_s = draft.timeouts.freeze_s
        verdicts.skip(draft, f"nobody was ready within freeze_s = {freeze_s:g} s after the stop")


def _end_at_once(draft: Draft) -> None:
    for record in draft.state.peers.values():
        draft.send(record.peer, Ended(kind="dismissed", reason=draft.state.stopping))
        draft.close(record)
    draft.finish(draft.state.stopping, 0)


def _nobody_froze(draft: Draft, members: tuple[PeerRecord, ...]) -> bool:
    closed_s = draft.state.round.closed_s
    if closed_s is None or any(record.ready is not None for record in members):
        return False
    return draft.now_s - closed_s >= draft.timeouts.freeze_s


# ---- leave -----------------------------------------------------------------------------------------------


def _ask_to_leave(draft: Draft, peer: str, reason: str) -> Done:
    record = draft.state.peers.get(peer)
    if record is None:
        return _unknown(draft, peer)
    why = _with_reason("asked to leave by an operator", reason)
    if not (draft.state.started and record.member):
        _dismiss(draft, record, why)
        return Done(True, f"{peer} does not train just now; it is sent away")
    draft.put(replace(record, leaving=why))
    draft.send(peer, AskToLeave(why))
    draft.emit(events.PeerAskedToLeave(peer=peer, reason=why))
    if not record.connected:
        return Done(True, f"{peer} is not connected; it is asked to leave as soon as it is back")
    if record.ready is not None:
        return Done(
            True, f"{peer} is asked to leave; it goes after the verdict of round {record.ready.round}"
        )
    return Done(True, f"{peer} is asked to leave; it goes at its next safe point")


def _dismiss(draft: Draft, record: PeerRecord, why: str) -> None:
    """It does not train: there is no safe point to wait for."""
    draft.send(record.peer, Ended(kind="dismissed", reason=why))
    draft.close(record)
    draft.remove(record.peer)
    draft.emit(events.PeerLeft(peer=record.peer, reason=why, members=ids(draft.state.members())))
    if record.member:
        draft.members_changed(f"{record.peer} left: {why}")


# ---- evict -----------------------------------------------------------------------------------------------


def _evict(draft: Draft, request: EvictPeer, spare_key: bytes, certified: bool) -> Done:
    state, peer = draft.state, request.peer
    record = state.peers.get(peer)
    if record is None and not certified and not _was_here(draft, peer):
        return _unknown(draft, peer)
    why = request.reason or "no reason was given"
    until_s = draft.now_s + request.for_s if request.for_s else math.inf
    kept = {name: each for name, each in state.evictions.items() if each.until_s > draft.now_s}
    draft.set(evictions={**kept, peer: Eviction(why, until_s)})
    draft.journal(EvictionDecided(peer=peer, reason=why, for_s=request.for_s, session_key=spare_key))
    if spare_key:
        _renew_key(draft, peer, spare_key)
    if record is not None:
        _shut_out(draft, record)
    draft.emit(
        events.PeerEvicted(peer=peer, reason=why, for_s=request.for_s, members=ids(draft.state.members()))
    )
    if record is not None and record.member:
        draft.members_changed(f"{peer} was evicted: {why}")
    how_long = f"for {request.for_s:g} s" if request.for_s else "until the run ends"
    was = "is evicted" if record is not None else "was gone already; it stays outside"
    return Done(True, f"{peer} {was}, and its id is refused {how_long}")


def _renew_key(draft: Draft, evicted: str, session_key: bytes) -> None:
    """The others go on with a key that the evicted peer does not know: no engine and no sidecar answers it any more.
    They hear of it before they hear of anything else, the next attempt's plan above all."""
    draft.set(session_key=session_key)
    for each in draft.state.peers.values():
        if each.connected and each.peer != evicted:
            draft.send(each.peer, SessionKey(session_key))


def _shut_out(draft: Draft, record: PeerRecord) -> None:
    peer = record.peer
    draft.send(peer, Refused(kind="evicted", reason=draft.state.eviction(peer, draft.now_s)))
    draft.close(record)
    draft.remove(peer)
    attempt = draft.state.round.attempt
    if attempt is not None and any(each.peer == peer for each in attempt.plan.contributions):
        verdicts.give_up(draft, f"{peer}, whose update is in it, was evicted")


# ---- words -----------------------------------------------------------------------------------------------


def _was_here(draft: Draft, peer: str) -> bool:
    return peer in draft.state.evictions or any(gone.process[0] == peer for gone in draft.state.gone)


def _unknown(draft: Draft, peer: str) -> Done:
    known = ", ".join(sorted(draft.state.peers)) or "none"
    return Done(False, f"this run has no peer {peer!r}; its peers are: {known}")


def _with_reason(what: str, reason: str) -> str:
    return f"{what}: {reason}" if reason else what
