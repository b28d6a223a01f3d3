"""Direct lanes: every member that reaches all others is the root of a star, for a share that fits its rates.

A retry keeps what is there: a lane whose root still serves covers exactly the same part of the vector, cut in the same
chunks, and only the part of a root that is gone is divided among the others. They may then be roots of several lanes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from atoll.plan.links import Lines, Links, measured_links, without
from atoll.plan.shares import star_fractions, whole_shares
from atoll.values import Edge, Lane

_MOST_SHARES = 1 << 53
_PARTS = 64
"""The part of a root that is gone is divided to one in so many per root that takes over."""


def direct_roots(links: Links | Lines) -> list[int]:
    """Indices of the members that reach all others both ways."""
    if isinstance(links, Lines):
        return list(range(len(links)))
    reaches = links.usable | np.eye(len(links), dtype=bool)
    return np.flatnonzero(reaches.all(axis=1)).tolist()


def direct_lanes(members: Sequence[str], broken: Collection[Edge] = ()) -> tuple[Lane, ...]:
    """Stars with equal shares at all members that reach all others over links that are not broken; () if none do."""
    return equal_lanes(without(measured_links(sorted(members), ()), broken))


def equal_lanes(links: Links | Lines) -> tuple[Lane, ...]:
    return tuple(Lane(links.members[i]) for i in direct_roots(links))


def fitted_lanes(links: Links | Lines, contributes: np.ndarray) -> tuple[Lane, ...]:
    """Stars with shares in proportion to what their roots can carry; () if no member reaches all others."""
    roots = direct_roots(links)
    if not roots:
        return ()
    shares = whole_shares(star_fractions(links, roots, contributes))
    return tuple(Lane(links.members[i], share) for i, share in zip(roots, shares, strict=True) if share)


def kept_lanes(previous: Sequence[Lane], links: Links | Lines, contributes: np.ndarray) -> tuple[Lane, ...]:
    """The previous attempt's stars, less the roots that cannot serve any more.

    () if there is nothing to keep: other trees than stars, or no root left.
    """
    roots = direct_roots(links)
    able = {links.members[i] for i in roots}
    if any(lane.up or lane.down for lane in previous) or not any(lane.root in able for lane in previous):
        return ()
    if all(lane.root in able for lane in previous):
        return tuple(previous)
    fractions = star_fractions(links, roots, contributes)
    wanted = dict(zip((links.members[i] for i in roots), fractions.tolist(), strict=True))
    return _with_lost_divided(previous, able, _room(previous, wanted))


def _room(previous: Sequence[Lane], wanted: Mapping[str, float]) -> dict[str, float]:
    """How much more each root would carry if everything was planned anew; even if that is nothing for all."""
    total = sum(lane.share for lane in previous)
    held = {root: sum(lane.share for lane in previous if lane.root == root) / total for root in wanted}
    room = {root: max(0.0, wanted[root] - held[root]) for root in wanted}
    return room if any(room.values()) else dict.fromkeys(wanted, 1.0)


def _with_lost_divided(
    previous: Sequence[Lane], able: set[str], room: Mapping[str, float]
) -> tuple[Lane, ...]:
    lost = [lane.share for lane in previous if lane.root not in able]
    scale = -(-_PARTS * len(room) // min(lost))
    if scale * sum(lane.share for lane in previous) > _MOST_SHARES:
        return ()
    lanes: list[Lane] = []
    for lane in previous:
        if lane.root in able:
            lanes.append(Lane(lane.root, lane.share * scale))
            continue
        parts = whole_shares(list(room.values()), lane.share * scale)
        lanes += [Lane(root, part) for root, part in zip(room, parts, strict=True) if part]
    return tuple(lanes)
