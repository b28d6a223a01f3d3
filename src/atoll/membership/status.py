"""How the run stands, in words: a pure function of the coordinator's state. It changes nothing and is not journaled."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from atoll import __version__
from atoll.membership import exclusion, leases, liveness
from atoll.membership.coordinator_state import CoordinatorState, PeerRecord, ids
from atoll.membership.operator import EvictedStatus, PeerStatus, ReachStatus, Remark, SlotsStatus, Status
from atoll.membership.rates import known_links
from atoll.membership.recollection import Commit, Said
from atoll.membership.ways import broken_pairs, rows, unreached
from atoll.values import shown

MAX_LINKS = 2500
MAX_SAYS = 32

OF_A_MEMBER = ("local", "ready", "reducing", "voted")
"""Phases of a heartbeat that say nothing about a peer that is no member (any more), or that the votes say better."""

SILENT_AFTER_BEATS = 2.5
"""A heartbeat may be late; more than one that is missing is worth a word."""


def report(state: CoordinatorState, now_s: float) -> Status:
    """The run as it is at `now_s`, the coordinator's own clock."""
    state, now_s = liveness.pass_time(state, now_s)
    recalled = state.recollection
    peers = tuple(_peer(state, record, now_s) for record in state.peers.values())
    slowest = heapq.nsmallest(MAX_LINKS, state.rates.items(), key=lambda item: item[1].bytes_per_s)
    round_s, tokens_per_s = pace(recalled.commits)
    return Status(
        run=state.settings.run,
        package=__version__,
        term=state.term,
        version=state.version,
        round=state.round.number,
        attempts=state.round.attempts,
        started=state.started,
        stopping=state.stopping,
        age_s=state.elapsed_before_s + now_s + state.paused_s - state.begun_s,
        policy=state.settings.policy,
        min_peers=state.settings.min_peers,
        start_peers=state.settings.start_peers,
        waiting=recalled.waiting,
        why=_reasons(state, now_s),
        peers=peers,
        evicted=_evicted(state, now_s),
        tokens_per_s=tokens_per_s,
        round_s=round_s,
        reasons=_remarks(recalled.reasons, now_s),
        failures=_remarks(recalled.failures, now_s),
        links=known_links(dict(slowest)),
        slots=_slots(state),
        reach=_reach(state),
    )


def _peer(state: CoordinatorState, record: PeerRecord, now_s: float) -> PeerStatus:
    word, says = _stands(state, record, now_s)
    newest = state.recollection.commits[-1:]
    return PeerStatus(
        peer=record.peer,
        state=word,
        says=says + (", asked to leave" if record.leaving else ""),
        member=record.member,
        step=record.step,
        steps_in_round=record.steps_in_round,
        round_steps=record.round_steps,
        tokens=newest[0].tokens.get(record.peer, 0) if newest else 0,
        heard_s=now_s - record.heard_s,
        leaving=record.leaving,
        slots=len(state.slots.held(record.peer)) if state.slots is not None else 0,
    )


def _slots(state: CoordinatorState) -> SlotsStatus | None:
    table = state.slots
    if table is None:
        return None
    leased = sum(len(held) for held in table.leases.values())
    return SlotsStatus(count=table.count, epoch=table.epoch, leased=leased, unread=leases.unread(table))


def _reach(state: CoordinatorState) -> ReachStatus | None:
    if not state.ways:
        return None
    ways, members = state.ways, sorted(ids(state.members()))
    pairs = sorted(edge for edge in broken_pairs(ways, members) if edge.source < edge.target)
    says = [
        f"{edge.source} and {edge.target} do not reach each other, so rounds go round them "
        f"({edge.source}: {ways[edge.source, edge.target].says}; {edge.target}: {ways[edge.target, edge.source].says})"
        for edge in pairs
    ]
    for peer, way in unreached(ways, members).items():
        record = state.peers[peer]
        where = f" at {shown(record.ranks[0].hosts, record.ranks[0].port)}" if record.ranks else ""
        says.append(
            f"nobody reaches {peer}{where} ({way.says}): it dials out, which is enough where the others can be "
            "reached; to change that, see local.advertise, local.port, and its firewall or NAT"
        )
    return ReachStatus(tuple(members), rows(ways, members), tuple(says[:MAX_SAYS]))


def _stands(state: CoordinatorState, record: PeerRecord, now_s: float) -> tuple[str, str]:
    """A word, and the same in a few words."""
    if not record.incarnation:
        return "expected", "not back since the coordinator started"
    if not record.connected:
        return "away", f"connection closed {now_s - record.dropped_s:.1f} s ago"
    silent_s = now_s - record.heard_s
    if silent_s > SILENT_AFTER_BEATS * state.settings.timeouts.heartbeat_s:
        return "silent", f"silent for {silent_s:.1f} s"
    if record.catching_up is not None:
        held, since_s = record.catching_up, now_s - record.catching_up.since_s
        return "catching up", f"from version {held.version} to {state.version}, for {since_s:.0f} s"
    if not record.member:
        known = record.phase not in ("", "connecting", *OF_A_MEMBER)
        return (record.phase, record.phase) if known else ("connected", "has not declared yet")
    if not state.started:
        return "waiting", "for the run to start"
    return _in_round(state, record)


def _in_round(state: CoordinatorState, record: PeerRecord) -> tuple[str, str]:
    attempt = state.round.attempt
    if attempt is not None and attempt.incarnations.get(record.peer) == record.incarnation:
        vote = attempt.votes.get(record.peer)
        if vote is None:
            return "reducing", f"attempt {attempt.plan.op.attempt}"
        return "voted", "yes" if vote.ok else f"no: {vote.reason}"
    if record.ready is not None:
        return "ready", f"{record.ready.tokens} tokens in {record.ready.steps} steps"
    if record.phase not in ("", "connecting", *OF_A_MEMBER):
        return record.phase, record.phase
    if record.phase in OF_A_MEMBER[1:]:  # said before it heard the verdict
        return "applying", "takes the outer step"
    if record.round_steps:
        return "training", f"step {record.steps_in_round} of {record.round_steps}"
    return "training", f"at step {record.step}"


def _reasons(state: CoordinatorState, now_s: float) -> tuple[str, ...]:
    """What explains the run as it is, one sentence each."""
    waits = [sentence for record in state.peers.values() if (sentence := _why(state, record, now_s))]
    held = exclusion.probation(state.offences, state.round.number)
    return (*waits, *(f"{peer}: {why}" for peer, why in sorted(held.items()) if peer in state.peers))


def _why(state: CoordinatorState, record: PeerRecord, now_s: float) -> str:
    """Why the run waits for this peer, and until when; "" if it does not."""
    timeouts, peer = state.settings.timeouts, record.peer
    word, says = _stands(state, record, now_s)
    match word:
        case "expected" | "away":
            left_s = liveness.absence_allowed_s(timeouts, record) - (now_s - record.dropped_s)
            return f"{peer} is {word} ({says}); it is lost in {max(0.0, left_s):.1f} s unless it is back"
        case "silent":
            return f"{peer} is {says}; it is lost at dead_s = {timeouts.dead_s:g} s"
        case "connected":
            return f"{peer} is connected and has not declared yet: it builds its model, or reads its data"
        case "training" if state.started and state.round.first_ready_s is not None:
            since_s = now_s - record.moved_s
            moved = f"its step last moved {since_s:.0f} s ago, " if since_s >= 2 else ""
            return f"{peer} is not ready yet ({says}); {moved}the others wait{_until(state, now_s)}"
    return ""


def _until(state: CoordinatorState, now_s: float) -> str:
    """When the waiting for members that are not ready ends."""
    round_, timeouts = state.round, state.settings.timeouts
    if round_.closed_s is not None:
        left_s = timeouts.freeze_s - (now_s - round_.closed_s)
        return f" another {max(0.0, left_s):.0f} s: the round is closed"
    since_s, limit_s = round_.first_ready_s, timeouts.ready_wait_s
    if state.settings.policy == "deadline" and round_.quorum_s is not None:
        since_s, limit_s = round_.quorum_s, timeouts.grace_s
    return "" if since_s is None else f" at most another {max(0.0, limit_s - (now_s - since_s)):.0f} s"


def _evicted(state: CoordinatorState, now_s: float) -> tuple[EvictedStatus, ...]:
    return tuple(
        EvictedStatus(peer, each.reason, None if math.isinf(each.until_s) else each.until_s - now_s)
        for peer, each in state.evictions.items()
        if each.until_s > now_s
    )


def pace(commits: Sequence[Commit]) -> tuple[float | None, float | None]:
    """Seconds a round and tokens a second, over the commits that are remembered."""
    if len(commits) < 2 or commits[-1].at_s <= commits[0].at_s:
        return None, None
    lasted_s = commits[-1].at_s - commits[0].at_s
    tokens = sum(sum(commit.tokens.values()) for commit in commits[1:])
    return lasted_s / (len(commits) - 1), tokens / lasted_s


def _remarks(said: Sequence[Said], now_s: float) -> tuple[Remark, ...]:
    return tuple(Remark(now_s - each.at_s, each.text) for each in reversed(said))
