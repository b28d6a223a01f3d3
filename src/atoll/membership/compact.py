"""Plans on the wire: a cut that several members share is said once.

A peer of many ranks owns thousands of ranges, and most peers of a run are cut alike; a plan goes to every member in
every round. So each member but the first of a cut is said to be cut as that one is.
"""

from __future__ import annotations

from msgspec.structs import replace

from atoll.values import Plan, Range

_FEW = 1
"""Ranges of a rank that are not worth it: a peer of one rank has one."""


def compact(plan: Plan) -> Plan:
    """The plan without the ranges that `whole` finds elsewhere in it."""
    first: dict[tuple[tuple[Range, ...], ...], str] = {}
    ranks, alike = dict(plan.ranks), dict(plan.alike)
    for peer, infos in plan.ranks.items():
        cut = tuple(info.ranges for info in infos)
        if sum(map(len, cut)) <= _FEW * len(cut):
            continue
        if (as_is := first.setdefault(cut, peer)) != peer:
            ranks[peer], alike[peer] = tuple(replace(info, ranges=()) for info in infos), as_is
    return replace(plan, ranks=ranks, alike=alike) if alike else plan


def whole(plan: Plan) -> Plan:
    """What was made compact. Raises ValueError if it is not that."""
    if not plan.alike:
        return plan
    ranks = dict(plan.ranks)
    for peer, as_is in plan.alike.items():
        theirs, pattern = plan.ranks.get(peer, ()), plan.ranks.get(as_is, ())
        if as_is in plan.alike or not pattern or len(theirs) != len(pattern):
            raise ValueError(f"the plan says that {peer!r} is cut as {as_is!r} is, which it cannot be")
        ranks[peer] = tuple(
            replace(info, ranges=like.ranges) for info, like in zip(theirs, pattern, strict=True)
        )
    return replace(plan, ranks=ranks, alike={})
