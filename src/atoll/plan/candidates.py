"""The topologies that a network allows, as lanes, each with its price; where one is not to be had, why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from atoll.plan.connections import chunk_size
from atoll.plan.lanes import equal_lanes, fitted_lanes
from atoll.plan.links import CROWD, Links
from atoll.plan.price import Price, busy_seconds, contributing, loads, price
from atoll.plan.regions import region_cuts, two_level
from atoll.plan.relays import relay_trees
from atoll.plan.ring import chains, hop_costs, ring_order
from atoll.plan.shapes import Tree, re_encodings
from atoll.plan.shares import balance, whole_shares
from atoll.values import CODECS, Lane

TOPOLOGIES = ("auto", "direct", "ring", "two-level")
_FEW_BITS, _MOST_AT_FEW_BITS = 8, 3
_CODEBOOK_BITS = 3


CLEARLY, CLEARLY_S = 0.95, 0.05
"""Other lanes than direct ones, and other shares than equal ones, are taken if they need at most this part of the time,
and save so many seconds: what is measured where everything is fast is mostly chance.
"""


class Task(Struct, frozen=True):
    """What is to be reduced over which links: `contributors` are names, `wire_bytes` one encoded vector.
    `num_connections` join two members, 0: the planner's choice."""

    links: Links
    wire_bytes: int
    codec: str
    contributors: tuple[str, ...]
    num_connections: int = 0

    @property
    def contributes(self) -> np.ndarray:
        return contributing(self.links.members, self.contributors)


class Candidate(Struct, frozen=True):
    """Lanes of one topology and what they cost; no lanes: `why_not` says why."""

    topology: str
    lanes: tuple[Lane, ...] = ()
    price: Price = Price(0.0, 0.0, "")
    chunk_bytes: int = 1 << 20
    why_not: str = ""


def most_re_encodings(codec: str) -> int | None:
    """How often a partial sum may be encoded on its way: without limit from 8 bits per element on, and never by a
    codebook or a codec that keeps only some elements, which spend less than 3.
    """
    spec = CODECS[codec]
    bits = 8 * spec.block_bytes(spec.block) / spec.block
    if bits >= _FEW_BITS:
        return None
    return _MOST_AT_FEW_BITS if bits >= _CODEBOOK_BITS else 0


def is_clearly_faster(one: Candidate, other: Candidate) -> bool:
    return one.price.seconds <= min(CLEARLY * other.price.seconds, other.price.seconds - CLEARLY_S)


def candidate(task: Task, topology: str, lanes: tuple[Lane, ...], chunk_bytes: int = 0) -> Candidate:
    """Priced, with chunks of `chunk_bytes` (0: of the size that suits these lanes)."""
    height = max((Tree.of(lane, task.links.members).height for lane in lanes if lane.up), default=1)
    chunk_bytes = chunk_bytes or chunk_size(task.links, lanes, task.wire_bytes, height)
    cost = price(
        task.links,
        lanes,
        task.wire_bytes,
        codec=task.codec,
        chunk_bytes=chunk_bytes,
        contributors=task.contributors,
        num_connections=task.num_connections,
    )
    return Candidate(topology, lanes, cost, chunk_bytes)


def direct(task: Task) -> Candidate:
    """Stars, with equal shares or, if those are clearly faster, by the members' lines, or, where single links are the
    limit, by those."""
    equal = equal_lanes(task.links)
    if not equal:
        return Candidate("direct", why_not="nobody reaches all others")
    best = candidate(task, "direct", equal)
    by_lines = candidate(task, "direct", fitted_lanes(task.links, task.contributes))
    if is_clearly_faster(by_lines, best):
        best = by_lines
    if best.price.bottleneck.startswith("the link") and 2 < len(equal) <= CROWD:
        by_links = candidate(task, "direct", _balanced(task, equal))
        best = min(best, by_links, key=lambda each: each.price.seconds)
    return best


def ring(task: Task) -> Candidate:
    order = ring_order(hop_costs(task.links, task.wire_bytes))
    if not order:
        return Candidate("ring", why_not="no ring avoids the links that cannot be used")
    return _of_trees(task, "ring", chains(order))


def two_levels(task: Task) -> Candidate:
    found = [
        _of_trees(task, "two-level", trees)
        for regions in region_cuts(task.links)
        if (trees := two_level(regions, task.links))
    ]
    if not found:
        return Candidate("two-level", why_not="there are no regions with thinner links between them")
    return min(found, key=lambda each: each.price.seconds)


def relay(task: Task) -> Candidate:
    most = most_re_encodings(task.codec)
    trees = relay_trees(task.links, None if most is None else most + 1)
    if not trees:
        return Candidate("relay", why_not="nobody reaches all others, not even through them")
    return _of_trees(task, "relay", trees)


BUILDERS: dict[str, Callable[[Task], Candidate]] = {
    "direct": direct,
    "ring": ring,
    "two-level": two_levels,
    "relay": relay,
}


def _of_trees(task: Task, topology: str, trees: Sequence[Tree]) -> Candidate:
    deepest, most = max(re_encodings(tree) for tree in trees), most_re_encodings(task.codec)
    if most is not None and deepest > most:
        why = f"it encodes sums {deepest} times on their way, {task.codec} bears {most}"
        return Candidate(topology, why_not=why)
    lanes = tuple(tree.lane(task.links.members) for tree in trees)
    if len(task.links) <= CROWD:
        lanes = _balanced(task, lanes)
    return candidate(task, topology, lanes)


def _balanced(task: Task, lanes: tuple[Lane, ...]) -> tuple[Lane, ...]:
    shares = whole_shares(balance(_costs(task, lanes)))
    return tuple(replace(lane, share=share) for lane, share in zip(lanes, shares, strict=True) if share)


def _costs(task: Task, lanes: Sequence[Lane]) -> np.ndarray:
    """Seconds that each resource (row) is busy if one lane (column) carries everything."""
    columns = []
    for lane in lanes:
        load = loads(task.links.members, [lane], task.wire_bytes, task.contributes)
        columns.append(
            np.concatenate(
                [
                    each.ravel()
                    for each in busy_seconds(task.links, load, task.codec, task.num_connections).values()
                ]
            )
        )
    costs = np.stack(columns, axis=1)
    busy = costs.max(axis=1)
    return costs[busy > busy.max() / 50]
