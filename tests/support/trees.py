"""Lanes of all shapes for tests: rings, two levels, and trees at random."""

from __future__ import annotations

import random
from collections.abc import Sequence

from atoll.plan.trees import parents_of
from atoll.values import Lane


def ring_lanes(members: Sequence[str]) -> tuple[Lane, ...]:
    """One chain for every root: up along the ring to the root, and on along the ring from it."""
    world = len(members)
    lanes = []
    for root in range(world):
        up = [(member + 1) % world for member in range(world)]
        down = [(member - 1) % world for member in range(world)]
        up[root] = down[root] = root
        lanes.append(Lane(members[root], up=tuple(up), down=tuple(down)))
    return tuple(lanes)


def two_level_lanes(members: Sequence[str], regions: Sequence[Sequence[int]]) -> tuple[Lane, ...]:
    """One lane for every root; in each other region one head sums for its region."""
    lanes = []
    for root in range(len(members)):
        up, down = [root] * len(members), [root] * len(members)
        for region in regions:
            if root in region:
                continue
            head = region[root % len(region)]
            for member in region:
                up[member] = down[member] = root if member == head else head
        lanes.append(Lane(members[root], up=tuple(up), down=tuple(down)))
    return tuple(lanes)


def random_lanes(members: Sequence[str], rng: random.Random) -> tuple[Lane, ...]:
    """One to four lanes with random shares; up and down are different trees."""
    return tuple(
        Lane(
            members[root],
            rng.randrange(1, 5),
            _random_tree(root, members, rng),
            _random_tree(root, members, rng),
        )
        for root in (rng.randrange(len(members)) for _ in range(rng.randrange(1, 5)))
    )


def hops(lane: Lane, members: Sequence[str]) -> list[tuple[str, str]]:
    """Who sends to whom, on the way up and down, if all contribute."""
    found = []
    for index, (up, down) in enumerate(zip(*parents_of(lane, members), strict=True)):
        if members[index] != lane.root:
            found += [(members[index], members[up]), (members[down], members[index])]
    return found


def _random_tree(root: int, members: Sequence[str], rng: random.Random) -> tuple[int, ...]:
    parents, there = [root] * len(members), [root]
    others = [member for member in range(len(members)) if member != root]
    rng.shuffle(others)
    for member in others:
        parents[member] = rng.choice(there)
        there.append(member)
    return tuple(parents)
