"""What a lane asks of each member: whose updates it adds up, where the mean goes, who hears the result. Pure.

The engine derives the same from the same plan (`native/engine/plan.cc`); this is for everything that works without
sockets: the planner's prices, the simulation, tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from atoll.values import Contribution, Lane


@dataclass(frozen=True, slots=True)
class Input:
    """What a member adds up in a lane: its own update (`member` is itself) or the mean that comes from another one."""

    member: int
    weight: int


@dataclass(frozen=True, slots=True)
class WayUp:
    """A lane's sum, for all members (by index): `inputs[m]` in adding order, `order` lists who sums before whom.

    One input alone is passed on as it is; members without inputs have nothing to do.
    """

    root: int
    inputs: tuple[tuple[Input, ...], ...]
    order: tuple[int, ...]


def parents_of(lane: Lane, members: Sequence[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`(up, down)` of a lane, with a star's written out. ValueError if the lane does not fit the members."""
    if lane.root not in members:
        raise ValueError(f"a lane's root {lane.root!r} is not among the members")
    star = (list(members).index(lane.root),) * len(members)
    up, down = lane.up or star, lane.down or star
    for parents in (up, down):
        if len(parents) != len(members) or not all(-1 <= parent < len(members) for parent in parents):
            raise ValueError(
                f"a lane of {lane.root!r} has parents {list(parents)} for {len(members)} members"
            )
    return tuple(up), tuple(down)


def way_up(lane: Lane, members: Sequence[str], contributions: Sequence[Contribution]) -> WayUp:
    """How the contributions become one sum. ValueError if one of them does not come to the root."""
    up, _ = parents_of(lane, members)
    index = {member: position for position, member in enumerate(members)}
    root = index[lane.root]
    weights: dict[int, int] = {}
    first: dict[int, int] = {}
    depth: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    own: dict[int, Input] = {}
    for order, contribution in enumerate(contributions):
        source = index[contribution.peer]
        own[source] = Input(source, contribution.weight)
        for steps, member in enumerate(path_to_root(source, up, root)):
            seen = member in weights
            weights[member] = weights.get(member, 0) + contribution.weight
            first.setdefault(member, order)
            depth[member] = max(depth.get(member, 0), steps)
            if member != root and not seen:
                children.setdefault(up[member], []).append(member)
    orders = {index[contribution.peer]: order for order, contribution in enumerate(contributions)}

    def inputs_of(member: int) -> tuple[Input, ...]:
        found = [(first[child], Input(child, weights[child])) for child in children.get(member, [])]
        if member in own:
            found.append((orders[member], own[member]))
        return tuple(each for _, each in sorted(found, key=lambda pair: pair[0]))

    inputs = tuple(inputs_of(member) for member in range(len(members)))
    return WayUp(root, inputs, tuple(sorted(weights, key=lambda member: (depth[member], member))))


def path_to_root(member: int, parents: Sequence[int], root: int) -> Iterator[int]:
    """`member`, its parent, and so on to the root. ValueError if the way does not end there."""
    for _ in range(len(parents) + 1):
        yield member
        if member == root:
            return
        member = parents[member]
        if member < 0:
            break
    raise ValueError(f"no way leads from member {member} to the root {root}: {list(parents)}")
