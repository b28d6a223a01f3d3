"""What nothing is known of yet is measured before a round is planned over it: links to and from new members. Pure.

The coordinator asks, once for each member and while no round runs: the newcomer measures its links to some of the
others, and they theirs to it. What comes back is a first guess: a round's own traffic takes its place. It must be cheap
beside a round, so a run with small updates does not ask at all: its first round says as much as soon.
"""

from __future__ import annotations

from atoll import events
from atoll.membership.coordinator_draft import Draft
from atoll.membership.coordinator_state import CoordinatorState, PeerRecord, ids, listed
from atoll.membership.messages import Probe, Probed
from atoll.membership.planning import wire_bytes
from atoll.membership.rates import learn
from atoll.values import RankInfo

PROBE_BYTES = 4 << 20
"""Over one link. TCP needs some of them before it sends as fast as the way allows: 1 MB at 200 Mbit/s and 80 ms."""
PART = 8
"""A probe is at most one part in so many of an update, and not worth its while below LEAST_BYTES."""
LEAST_BYTES = 256 << 10
LINK_S = 1.0
MOST_PARTNERS = 8
"""Of a thousand members the first eight tell enough of a newcomer's line."""
CONNECTIONS = 4
"""Where the run does not say how many: as many as the planner takes at least on a long way."""


def ask(draft: Draft) -> None:
    """Have the links of new members measured, if no round runs or is about to."""
    state = draft.state
    if not _is_quiet(state):
        return
    members = state.members()
    new = [record for record in members if record.connected and record.peer not in state.probed]
    if not new:
        return
    draft.set(probed=(state.probed & set(ids(members))) | {record.peer for record in new})
    num_bytes = min(PROBE_BYTES, wire_bytes(state) // PART)
    if num_bytes < LEAST_BYTES:
        return
    orders = _orders(state, members, new)
    for peer, targets in sorted(orders.items()):
        draft.send(peer, Probe(targets, num_bytes, state.settings.connections or CONNECTIONS, LINK_S))
    if orders:
        draft.because(f"the links of {listed(record.peer for record in new)} are measured")


def hear_probed(draft: Draft, record: PeerRecord, message: Probed) -> None:
    state = draft.state
    number = state.round.number
    reports, members = {record.peer: message.links}, ids(state.members())
    rates, changed = learn(state.rates, reports, number, members, probed=True)
    draft.set(rates=rates)
    if changed:
        draft.emit(events.RatesMeasured(round=number, links=changed, probed=True))
    if message.failed:
        draft.emit(
            events.ProbesFailed(peer=record.peer, reasons=dict(list(message.failed.items())[:MOST_PARTNERS]))
        )
    draft.because(f"{record.peer} measured {len(changed)} links, and could not {len(message.failed)}")


def _is_quiet(state: CoordinatorState) -> bool:
    round_ = state.round
    nobody_waits = round_.attempt is None and round_.first_ready_s is None
    return state.started and nobody_waits and not state.stopping and not state.ending()


def _orders(
    state: CoordinatorState, members: tuple[PeerRecord, ...], new: list[PeerRecord]
) -> dict[str, dict[str, RankInfo]]:
    """Who measures which links, of those between a new member and its partners that are not known."""
    able = sorted(
        (each for each in members if each.connected and each.ranks and each.ranks[0].host),
        key=lambda each: each.peer,
    )
    place = {record.peer: index for index, record in enumerate(able)}
    orders: dict[str, dict[str, RankInfo]] = {}
    for newcomer in new:
        if newcomer.peer not in place:
            continue
        after = place[newcomer.peer] + 1
        for partner in (able[after:] + able[: after - 1])[:MOST_PARTNERS]:
            for source, target in ((newcomer, partner), (partner, newcomer)):
                if (source.peer, target.peer) not in state.rates:
                    orders.setdefault(source.peer, {})[target.peer] = target.ranks[0]
    return orders
