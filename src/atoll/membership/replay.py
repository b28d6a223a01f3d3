"""From a journal to the state of a coordinator that starts again."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from atoll.membership import leasing
from atoll.membership.coordinator_state import CoordinatorState, Eviction, OpenRound, PeerRecord, remember
from atoll.membership.exclusion import remember_norms
from atoll.membership.messages import Scalar
from atoll.membership.settings import CoordinatorSettings
from atoll.membership.steps import (
    Certified,
    EvictionDecided,
    JournalRecord,
    LeasesChanged,
    MembersChanged,
    PlanMade,
    RunDefined,
    StateDigest,
    StopDecided,
    TermRaised,
    TokenMade,
    TokenRevoked,
    VerdictMade,
    VersionLearned,
)
from atoll.values import ParameterInfo


def replay(
    settings: CoordinatorSettings,
    records: Sequence[JournalRecord],
    session_key: bytes,
    run_settings: dict[str, Scalar] | None,
    now_s: float,
) -> CoordinatorState:
    """The state after `records`, one term up, waiting for the members of then. A journaled key is kept."""
    state = CoordinatorState(
        settings=settings,
        term=0,
        session_key=session_key,
        run_settings=run_settings,
        begun_s=now_s,
        last_s=now_s,
    )
    members: tuple[str, ...] = ()
    for record in records:
        state = _apply(state, record)
        if isinstance(record, MembersChanged):
            members = record.members
    expected = {
        peer: PeerRecord(
            peer=peer,
            incarnation="",
            heard_s=now_s,
            connected=False,
            dropped_s=now_s,
            member=True,
            moved_s=now_s,
        )
        for peer in members
    }
    held = state.slots.leases if state.slots is not None else {}
    return replace(
        state,
        term=state.term + 1,
        peers=expected,
        returning=tuple(peer for peer in held if peer not in expected),
    )


def _apply(state: CoordinatorState, record: JournalRecord) -> CoordinatorState:
    match record:
        case TermRaised(term=term, session_key=session_key):
            return replace(state, term=max(state.term, term), session_key=session_key)
        case RunDefined():
            layout = {name: ParameterInfo(name, shape, dtype) for name, shape, dtype in record.layout}
            state = replace(state, layout=layout, run_settings=dict(record.settings))
            if state.version > 0:  # learned before: of its digest the majority decides
                return state
            known = remember(state.known, 0, state.round.number - 1, record.digest)
            return replace(state, digest=record.digest, known=known)
        case MembersChanged():
            return replace(state, started=record.started, done=record.done)
        case PlanMade(op=op):
            return replace(state, term=max(state.term, op.term), decided_term=op.term)
        case StateDigest(version=version, digest=digest):
            if version != state.version:
                return state
            known = remember(state.known, version, state.round.number - 1, digest)
            return replace(state, digest=digest, known=known)
        case LeasesChanged():
            return replace(state, slots=leasing.changed(state.slots, record))
        case VersionLearned(version=version, round=round_, digest=digest, rolled_back=rolled_back):
            return replace(
                state,
                version=version,
                digest=digest,
                known=remember(state.known, version, round_, digest) if digest else state.known,
                round=OpenRound(number=round_ + 1),
                commit=None,
                verdict=None,
                done=False,
                decided_term=state.term if rolled_back else state.decided_term,
                slots=record.slots,
                tables=leasing.remember((), record.slots),
            )
        case StopDecided(reason=reason):
            return replace(state, stopping=reason)
        case EvictionDecided(peer=peer, reason=reason, for_s=for_s, session_key=key):
            until_s = state.last_s + for_s if for_s else math.inf
            evictions = {**state.evictions, peer: Eviction(reason, until_s)}
            return replace(state, evictions=evictions, session_key=key or state.session_key)
        case TokenMade() | TokenRevoked() | Certified():
            return state  # the register's
        case VerdictMade(verdict=verdict):
            committed = verdict.outcome == "committed"
            return replace(
                state,
                verdict=verdict,
                commit=verdict if committed else state.commit,
                version=verdict.version,
                digest="" if committed else state.digest,
                norms=remember_norms(state.norms, record.norms),
                round=OpenRound(number=verdict.op.round + 1),
                elapsed_before_s=record.elapsed_s,
                diverging_rounds=record.diverging_rounds,
                saved_at_s=record.elapsed_s if verdict.saves else state.saved_at_s,
                slots=verdict.slots,
                tables=leasing.remember(state.tables, verdict.slots if committed else None),
            )
