"""Who can dial whom: asked as a member comes, before a round is planned over it, and again when that may have changed.

Of two peers one that can dial the other is enough: links are used in both directions. A pair of which neither can (both
behind a NAT, say) has no edge, and plans go round it. Pure; kept by the coordinator, not in the journal: a restarted
one asks anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from atoll import events
from atoll.membership.coordinator_draft import Draft
from atoll.membership.coordinator_state import PeerRecord, ids, listed
from atoll.membership.messages import Reach, Reached
from atoll.membership.ways import Way, Ways, broken_pairs, one_way
from atoll.values import Edge, LinkRate, RankInfo

TRIAL_S = 3.0
"""A peer has so long to say hello: a way there and back of half a second is far. Who is behind a NAT never does."""
ANSWER_S = 1.5
"""So much later, at most, a peer has told what came of its trials; no round waits for it any longer."""
MOST_PEERS = 64
"""Above so many members pairs are not asked about: a round that finds one impossible goes round it."""
AGAIN_S = 30.0
"""Pairs without an edge are asked about again so often: somebody may have opened a port."""
CARRIED = "it carried a round"
BROKE = "a round lost a link between their ranks"


def ask(draft: Draft) -> None:
    """Have newcomers dial all others, and all others dial them; now and then those that have no edge."""
    state = draft.state
    members = state.members()
    if len(members) > MOST_PEERS:
        return
    new = [each for each in members if _able(each) and state.dialled.get(each.peer) != each.incarnation]
    if new:
        _ask_of_newcomers(draft, members, new)
    elif state.dials_due_s and all(due_s <= draft.now_s for due_s in state.dials_due_s.values()):
        draft.set(dials_due_s={})  # who has not answered by now is waited for no longer
        _tell(draft)
    elif state.ways and draft.now_s >= state.dial_again_s:
        draft.set(dial_again_s=draft.now_s + AGAIN_S)
        doubt(draft, broken_pairs(state.ways, ids(members)))


def doubt(draft: Draft, edges: Iterable[Edge]) -> None:
    """Have both ends of these pairs dial each other again. What is known of them holds until they have answered."""
    able = {each.peer: each for each in draft.state.members() if _able(each)}
    orders: dict[str, dict[str, RankInfo]] = {}
    for edge in edges:
        for source, target in ((edge.source, edge.target), (edge.target, edge.source)):
            if source in able and target in able:
                orders.setdefault(source, {})[target] = able[target].ranks[0]
    for peer, targets in sorted(orders.items()):
        draft.send(peer, Reach(targets, TRIAL_S))


def round_broke(draft: Draft, edges: Iterable[Edge]) -> None:
    """A round lost these links: both ends dial again. Trials are of rank 0 alone, and so say little where a peer has
    several ranks: such a pair counts as one without an edge for AGAIN_S, whatever they find."""
    members = draft.state.members()
    ranks = {each.peer: len(each.ranks) for each in members}
    living = [edge for edge in edges if edge.source in ranks and edge.target in ranks]
    several = [edge for edge in living if max(ranks[edge.source], ranks[edge.target]) > 1]
    if several and len(members) <= MOST_PEERS:
        lost = Way(ok=False, says=BROKE, holds_until_s=draft.now_s + AGAIN_S)
        pairs = [
            pair for edge in several for pair in ((edge.source, edge.target), (edge.target, edge.source))
        ]
        _take(draft, {**draft.state.ways, **dict.fromkeys(pairs, lost)})
    doubt(draft, living)


def hear_reached(draft: Draft, record: PeerRecord, message: Reached) -> None:
    state = draft.state
    members = set(ids(state.members()))
    ways = dict(state.ways)
    found = {target: Way(ok=False, says=why) for target, why in message.failed.items()}
    found |= {target: Way(ok=True, says=where) for target, where in message.where.items()}
    for target, way in found.items():
        known = ways.get((record.peer, target))
        held = known is not None and draft.now_s < known.holds_until_s
        if target in members and target != record.peer and not held:
            ways[record.peer, target] = way
    awaited = {peer: due_s for peer, due_s in state.dials_due_s.items() if peer != record.peer}
    draft.set(dials_due_s=awaited)
    _take(draft, ways)
    failed = sorted(set(message.failed) & members)
    draft.because(
        f"{record.peer} reaches {listed(message.where)}" + (f", not {listed(failed)}" * bool(failed))
    )


def learn_used(draft: Draft, reports: Mapping[str, Collection[LinkRate]]) -> None:
    """Links that carried a round exist, whatever trials found: those may have been too slow."""
    ways = dict(draft.state.ways)
    for peer, links in reports.items():
        for link in links:
            pair, back = (link.source, link.target), (link.target, link.source)
            known = (ways.get(pair), ways.get(back))
            if peer in pair and link.bytes_per_s > 0 and all(way and not way.ok for way in known):
                ways[pair] = Way(ok=True, says=CARRIED)
    if ways != draft.state.ways:
        _take(draft, ways)


def awaited(draft: Draft, members: Collection[PeerRecord]) -> str:
    """What a round waits for that may be planned over a pair of which nothing is known yet; "" for nothing."""
    if len(members) > MOST_PEERS:
        return ""
    late = {peer: due_s for peer, due_s in draft.state.dials_due_s.items() if due_s > draft.now_s}
    names = [each.peer for each in members if each.peer in late and each.connected]
    if not names:
        return ""
    left_s = max(late[peer] for peer in names) - draft.now_s
    return f"{listed(names)} find out whom they can reach, for {left_s:.1f} s at most"


def _able(record: PeerRecord) -> bool:
    return record.connected and bool(record.ranks) and bool(record.ranks[0].host) and record.ranks[0].port > 0


def _ask_of_newcomers(draft: Draft, members: tuple[PeerRecord, ...], new: list[PeerRecord]) -> None:
    state = draft.state
    names, fresh = set(ids(members)), {each.peer for each in new}
    draft.set(
        dialled={peer: process for peer, process in state.dialled.items() if peer in names}
        | {each.peer: each.incarnation for each in new},
        dial_again_s=draft.now_s + AGAIN_S,
    )
    ways = {
        pair: way for pair, way in state.ways.items() if names.issuperset(pair) and fresh.isdisjoint(pair)
    }
    able = [each for each in members if _able(each)]
    due_s = {peer: at_s for peer, at_s in state.dials_due_s.items() if peer in names and at_s > draft.now_s}
    for each in able:
        others = able if each.peer in fresh else new
        targets = {other.peer: other.ranks[0] for other in others if other.peer != each.peer}
        if targets:
            due_s[each.peer] = draft.now_s + TRIAL_S + ANSWER_S
            draft.send(each.peer, Reach(targets, TRIAL_S))
    draft.set(dials_due_s=due_s)
    _take(draft, ways)
    if due_s:
        draft.because(f"{listed(fresh)} and the others dial each other")


def _take(draft: Draft, ways: Ways) -> None:
    """`ways` is what is known now."""
    draft.set(ways=ways)
    _tell(draft)


def _tell(draft: Draft) -> None:
    """Once all have answered: whether other pairs than before have no edge, or one that goes one way only."""
    state = draft.state
    if state.dials_due_s:
        return
    members = ids(state.members())
    none = tuple(sorted(edge for edge in broken_pairs(state.ways, members) if edge.source < edge.target))
    halves = tuple(sorted(one_way(state.ways, members)))
    if (none, halves) == state.told_edges:
        return
    draft.set(told_edges=(none, halves))
    reasons = {f"{source} -> {target}": way.says for (source, target), way in _reasons(state.ways)}
    draft.emit(events.ReachChanged(none=none, one_way=halves, reasons=reasons))


def _reasons(ways: Ways) -> list[tuple[tuple[str, str], Way]]:
    return sorted((pair, way) for pair, way in ways.items() if not way.ok)[:MOST_PEERS]
