"""Routes: how peers of different size meet. Pure integers, the same on every member.

A rank owns ranges of the model's one long vector, and peers are cut into ranks differently. Cut the vector at every
shard boundary of any member: what lies between two cuts, a *segment*, has one owner in each member. A *route* is all
segments that the same rank owns in every member; along it these ranks, one a member, reduce as if they were alone.

An op's vector is *route-major*: routes in the order in which they first appear, within a route the segments in
ascending order. So a route is one stretch of the op's vector though its elements are scattered over the model, and
what a rank holds of it is some whole routes, one after the other. Codec blocks restart at every segment: where the
members are cut otherwise, the blocks lie otherwise.

Where every member is cut alike that order may differ from the model's, but never a rank's own: it has one route, and
its bytes are those of its own vector. With one rank in each member it is the model's order: nothing is different.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from atoll.plan.grid import Grid, Int64s
from atoll.runs import Runs, wire_offsets
from atoll.values import Plan, Range, RankInfo

_Cut = tuple[tuple[Range, ...], ...]
"""A member's ranges, by rank."""


@dataclass(frozen=True, eq=False)
class Part:
    """What one rank has of an op: whole routes (`routes` are their numbers), one after the other.

    `grid` is that of its wire bytes; `runs` lead from its own vector (its ranges in ascending order) to them.
    """

    routes: Int64s
    grid: Grid
    runs: Runs


@dataclass(frozen=True, eq=False)
class Routing:
    """`routes[r][m]` is the number of the rank that owns route `r` in member `m`; it is the stretch
    `[cuts[r], cuts[r+1])` of the op's vector, whose `grid` has segments that begin at `starts` in the model's."""

    members: tuple[str, ...]
    routes: tuple[tuple[int, ...], ...]
    cuts: Int64s
    grid: Grid
    starts: Int64s
    num_ranks: tuple[int, ...]
    _parts: dict[tuple[int, int], Part] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def whole(self) -> Runs:
        """From the model's whole vector to the op's."""
        return _runs(self.grid.boundaries, self.starts)

    @property
    def is_identity(self) -> bool:
        """The op's vector is the model's."""
        return len(self.whole) <= 1

    @cached_property
    def order(self) -> tuple[tuple[int, int], ...]:
        """Which stretches of the model's vector, start and stop, follow each other in the op's; none if it is the
        model's own (`recovery.update.Update.order`)."""
        if self.is_identity:
            return ()
        starts = self.whole.starts
        return tuple(zip(starts.tolist(), (starts + np.diff(self.whole.cuts)).tolist(), strict=True))

    @cached_property
    def order_key(self) -> int:
        """64 bits that name the order; 0 is the model's own."""
        if self.is_identity:
            return 0
        text = np.concatenate([self.whole.starts, self.whole.cuts]).astype("<i8").tobytes()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")

    def part(self, peer: str, rank: int) -> Part:
        """ValueError if the plan has no such rank."""
        if peer not in self.members or rank >= self.num_ranks[self.members.index(peer)]:
            raise ValueError(f"{peer!r} has no rank {rank} among the plan's members")
        member = self.members.index(peer)
        if (member, rank) not in self._parts:
            self._parts[member, rank] = self._part(member, rank)
        return self._parts[member, rank]

    def _part(self, member: int, rank: int) -> Part:
        routes = np.asarray([r for r, ranks in enumerate(self.routes) if ranks[member] == rank], np.int64)
        if len(routes) == len(self.routes):
            return Part(routes, self.grid, self.whole)
        of_segment = np.searchsorted(self.cuts, self.grid.boundaries[:-1], side="right") - 1
        own = np.isin(of_segment, routes)
        sizes = np.diff(self.grid.boundaries)[own]
        in_model = np.argsort(self.starts[own])
        starts = np.empty_like(sizes)
        starts[in_model] = np.cumsum(sizes[in_model]) - sizes[in_model]
        grid = Grid(tuple(sizes.tolist()))
        return Part(routes, grid, _runs(grid.boundaries, starts))

    def wire_cuts(self, codec: str) -> Int64s:
        """Byte positions in the op's encoded vector at which routes begin; at last its length."""
        boundaries = self.grid.boundaries
        return wire_offsets(codec, boundaries)[np.searchsorted(boundaries, self.cuts)]

    def wire_slices(self, codec: str, part: Part) -> list[slice]:
        """Where the routes of a part lie in the op's encoded vector: these bytes, one after the other, are its own."""
        cuts = self.wire_cuts(codec)
        return [slice(int(cuts[route]), int(cuts[route + 1])) for route in part.routes]


def routing(members: Sequence[str], ranks: Mapping[str, Sequence[RankInfo]], grid: Grid) -> Routing:
    """The routes of `members` (in this order) through a model of parameters of the sizes in `grid`, in layout order.

    ValueError, in one sentence, if a member's ranks do not own each element once. Remembered for the latest members
    and grids.
    """
    cuts = tuple(tuple(info.ranges for info in ranks[peer]) for peer in members)
    return _routing(tuple(members), cuts, grid)


def routing_of(plan: Plan, grid: Grid) -> Routing:
    """See `routing`."""
    return routing(plan.members, plan.ranks, grid)


@lru_cache(maxsize=8)
def _routing(members: tuple[str, ...], cuts: tuple[_Cut, ...], grid: Grid) -> Routing:
    owners: dict[_Cut, tuple[Int64s, Int64s]] = {}  # members that are cut alike are looked at once
    for peer, cut in zip(members, cuts, strict=True):
        if cut not in owners:
            owners[cut] = _owners(peer, cut, grid.numel)
    bounds = np.unique(np.concatenate([grid.boundaries, *(starts for starts, _ in owners.values())]))
    starts = bounds[:-1]
    by_cut = {
        cut: ranks[np.searchsorted(begin, starts, side="right") - 1] for cut, (begin, ranks) in owners.items()
    }
    route, first = _numbered(list(by_cut.values()), len(starts))
    in_op = np.argsort(route, kind="stable")
    sizes = np.diff(bounds)[in_op]
    by_route = [by_cut[cut][first].tolist() for cut in cuts]
    return Routing(
        members=members,
        routes=tuple(zip(*by_route, strict=True)),
        cuts=np.concatenate([[0], np.cumsum(np.bincount(route, weights=np.diff(bounds)))]).astype(np.int64),
        grid=Grid(tuple(sizes.tolist())) if len(first) > 1 else grid,
        starts=starts[in_op],
        num_ranks=tuple(len(cut) for cut in cuts),
    )


def _numbered(owners: Sequence[Int64s], num_segments: int) -> tuple[Int64s, Int64s]:
    """Each segment's route, numbered by first appearance; and by route the segment where it first appears."""
    code = np.zeros(num_segments, dtype=np.int64)
    for ranks in owners:
        _, code = np.unique(code * (int(ranks.max(initial=0)) + 1) + ranks, return_inverse=True)
    _, first, code = np.unique(code, return_index=True, return_inverse=True)
    rank = np.empty_like(first)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[code], np.sort(first)


def _owners(peer: str, cut: _Cut, numel: int) -> tuple[Int64s, Int64s]:
    """Where another rank's part begins, ascending, and whose it is."""
    pieces = sorted(
        (each.start, each.stop, rank)
        for rank, ranges in enumerate(cut)
        for each in ranges
        if each.start != each.stop
    )
    complaint = _complaint(peer, pieces, numel)
    if complaint:
        raise ValueError(complaint)
    starts, _, ranks = np.asarray(pieces, dtype=np.int64).reshape(-1, 3).T
    changes = np.ones(len(ranks), dtype=bool)
    changes[1:] = ranks[1:] != ranks[:-1]
    return starts[changes], ranks[changes]


def _complaint(peer: str, pieces: list[tuple[int, int, int]], numel: int) -> str:
    """The first thing that is wrong with a member's ranges, in ascending order; empty: nothing."""
    done, owner = 0, 0
    for start, stop, rank in pieces:
        if start > stop or start < 0 or stop > numel:
            return f"peer {peer!r} rank {rank} owns elements {start} to {stop}; the model has 0 to {numel}"
        if start > done:
            return f"nobody of peer {peer!r} owns elements {done} to {start}"
        if start < done:
            whose = "twice" if rank == owner else f"which its rank {owner} owns too"
            return f"peer {peer!r} rank {rank} owns elements {start} to {min(stop, done)}, {whose}"
        done, owner = stop, rank
    return f"nobody of peer {peer!r} owns elements {done} to {numel}" if done < numel else ""


def _runs(boundaries: Int64s, starts: Int64s) -> Runs:
    """Segments that follow each other here and there alike are one run."""
    sizes = np.diff(boundaries)
    begins = np.ones(len(starts), dtype=bool)
    begins[1:] = starts[1:] != starts[:-1] + sizes[:-1]
    return Runs(boundaries, starts[begins], np.append(boundaries[:-1][begins], boundaries[-1]))
