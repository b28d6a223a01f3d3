"""An attempt's plan: who is in it and with which weight, on which digest, over which lanes.

Links that broke in an attempt carry nothing in the next ones. If no lane avoids the broken links they are
tried once more in the same round, as a reset connection is no reason to lose a peer that lives; then the
smallest set goes. Which lanes there are is the planner's affair (`Draft.make_lanes`).
"""

from __future__ import annotations

import math

from atoll import events
from atoll.membership import exclusion, leasing
from atoll.membership.admission import dismiss
from atoll.membership.catching_up import MOST_ELEMENTS, wrong_bits
from atoll.membership.coordinator_draft import Draft
from atoll.membership.coordinator_state import Attempt, CoordinatorState, PeerRecord, ids, listed, majority
from atoll.membership.exclusion import Selection
from atoll.membership.messages import Ready, Reduce
from atoll.membership.rates import known_links
from atoll.membership.steps import PlanMade, StateDigest
from atoll.membership.verdicts import skip
from atoll.membership.ways import broken_pairs
from atoll.values import CODECS, Edge, OpId, Plan, PlanChoice, PlanRequest, shown


def agree_on_digest(draft: Draft, *, everybody: bool) -> None:
    """Settle which digest the newest version has, and part with those who hold another one.

    The journaled digest decides; while there is none, the majority of those who reported one (`everybody`:
    not before all members did), a tie going to the oldest.
    """
    state = draft.state
    if (
        everybody
        and not state.digest
        and any(each.member and not each.digest for each in state.peers.values())
    ):
        return
    reported = [record for record in state.members() if record.digest]
    if not state.digest:
        if not reported:
            return
        draft.set_digest(majority(record.digest for record in reported))
        draft.journal(StateDigest(version=state.version, digest=draft.state.digest))
    for record in reported:
        if record.digest != draft.state.digest:
            wrong_bits(draft, record, record.digest, held_round=state.round.number - 1)


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
    choice = _choose_lanes(draft, ready, selection)
    if choice is not None:
        _start_attempt(draft, ready, selection, choice)


def _select(draft: Draft, ready: tuple[PeerRecord, ...]) -> Selection:
    state = draft.state
    assert state.run_settings is not None
    return exclusion.select(
        _readies(ready),
        state.norms,
        norm_limit=state.settings.norm_limit,
        equal=state.run_settings.get("outer.weights") == "equal",
        probation=exclusion.probation(state.offences, state.round.number),
        unleased=leasing.broken(state, _readies(ready)),
    )


def _readies(ready: tuple[PeerRecord, ...]) -> dict[str, Ready]:
    return {record.peer: record.ready for record in ready if record.ready is not None}


def _choose_lanes(draft: Draft, ready: tuple[PeerRecord, ...], selection: Selection) -> PlanChoice | None:
    """Lanes that avoid the links which broke in this round and the pairs that have none; None if members had to be
    dropped for it."""
    members, round_ = ids(ready), draft.state.round
    broken = frozenset(edge for edge in round_.broken if edge.source in members and edge.target in members)
    broken |= broken_pairs(draft.state.ways, members)
    choice = draft.make_lanes(_request(draft, ready, selection, broken))
    if choice.dropped and not round_.links_forgiven:
        draft.set_round(links_forgiven=True, broken=frozenset())
        draft.because("no lane avoids the broken links, they are tried once more")
        choice = draft.make_lanes(_request(draft, ready, selection, frozenset()))
    for record in ready:
        if record.peer in choice.dropped:
            links = listed(f"{e.source}->{e.target}" for e in broken if record.peer in (e.source, e.target))
            reason = (
                f"no lane avoids the broken links of {record.peer} ({links}): round {round_.number} drops it"
                + _what_to_do(ready, record, broken)
            )
            dismiss(draft, record, "left_out", reason)
    return None if choice.dropped else choice


def _what_to_do(ready: tuple[PeerRecord, ...], dropped: PeerRecord, broken: frozenset[Edge]) -> str:
    """Where those tried to reach each other that could not, and the remedy; "" if they told no address."""
    pairs = [{edge.source, edge.target} for edge in broken if dropped.peer in (edge.source, edge.target)]
    ends = set[str]().union(*pairs)
    told = [
        f"{each.peer} advertises {shown(each.ranks[0].hosts, each.ranks[0].port)}"
        for each in ready
        if each.peer in ends and each.ranks
    ]
    if not told:
        return ""
    return (
        f"; {', '.join(sorted(told))}: see that these can be reached (local.advertise, local.port, firewalls)"
    )


def _request(
    draft: Draft, ready: tuple[PeerRecord, ...], selection: Selection, broken: frozenset[Edge]
) -> PlanRequest:
    state = draft.state
    return PlanRequest(
        members=ids(ready),
        contributors=tuple(each.peer for each in selection.contributions),
        wire_bytes=wire_bytes(state),
        codec=codec_of(state),
        broken=broken,
        links=known_links(state.rates),
        max_up={record.peer: sum(rank.max_up for rank in record.ranks) for record in ready},
        max_down={record.peer: sum(rank.max_down for rank in record.ranks) for record in ready},
        previous=state.round.previous,
        topology=state.settings.topology,
        connections=state.settings.connections,
    )


def wire_bytes(state: CoordinatorState) -> int:
    """The size of one encoded update; 0 before the first declaration."""
    sizes, codec = _sizes(state), codec_of(state)
    return sum(CODECS[codec].run_bytes(size) for size in sizes) if codec in CODECS else sum(sizes)


def num_elements(state: CoordinatorState) -> int:
    """How many numbers an update holds; 0 before the first declaration."""
    return sum(_sizes(state))


def _sizes(state: CoordinatorState) -> list[int]:
    return [min(math.prod(each.shape), MOST_ELEMENTS) for each in (state.layout or {}).values()]


def codec_of(state: CoordinatorState) -> str:
    """The name of the codec of updates, known to this version or not."""
    return str((state.run_settings or {}).get("outer.codec", "int8"))


def _start_attempt(
    draft: Draft, ready: tuple[PeerRecord, ...], selection: Selection, choice: PlanChoice
) -> None:
    state, timeouts = draft.state, draft.timeouts
    op = OpId(term=state.term, round=state.round.number, attempt=state.round.attempts)
    members = tuple(sorted(ids(ready)))
    contributors = tuple(each.peer for each in selection.contributions)
    plan = Plan(
        op=op,
        base_version=state.version,
        members=members,
        contributions=selection.contributions,
        ranks={record.peer: record.ranks for record in ready},
        lanes=choice.lanes,
        codec=codec_of(state),
        deadline_s=timeouts.attempt_s,
        chunk_bytes=choice.chunk_bytes,
        connections=choice.connections,
    )
    attempt = Attempt(
        plan=plan,
        incarnations={record.peer: record.incarnation for record in ready},
        left_out=selection.left_out,
        norms=selection.norms,
        due_s=draft.now_s + timeouts.attempt_s + timeouts.vote_s,
        reads={peer: message.reads for peer, message in _readies(ready).items()},
        unleased=tuple(leasing.broken(state, _readies(ready))),
    )
    draft.set_round(attempt=attempt, attempts=state.round.attempts + 1, previous=plan)
    draft.set(learning=False)
    draft.journal(PlanMade(op=op, members=members, contributors=contributors))
    reason = f"attempt {op}: {listed(members)} reduce, {listed(contributors)} contribute{_absent(selection)}"
    draft.because(reason)
    draft.emit(
        events.AttemptStarted(
            op=str(op),
            members=members,
            contributors=contributors,
            reason=f"{reason}; {choice.reason}" if choice.reason else reason,
            topology=choice.topology,
            predicted_s=choice.predicted_s,
        )
    )
    for peer in members:
        draft.send(peer, Reduce(plan))


def _absent(selection: Selection) -> str:
    idle = f"; {listed(selection.idle)} took no step" if selection.idle else ""
    return idle + "".join(f"; {peer} is left out: {why}" for peer, why in selection.left_out.items())
