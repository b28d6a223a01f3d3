"""Which lanes carry an attempt: candidates are built and priced, the fastest is taken, and the reason is said.

Pure. Only the coordinator plans, once for all; what members compute from the plan is integers. Direct lanes are
preferred unless others are clearly faster: they keep contributions for a retry, and encode a sum only once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from atoll.plan.candidates import (
    BUILDERS,
    TOPOLOGIES,
    Candidate,
    Task,
    candidate,
    is_clearly_faster,
    most_re_encodings,
)
from atoll.plan.connections import chunk_size, connections
from atoll.plan.crowd import CrowdTask, crowd_candidate, crowd_connections, crowd_direct
from atoll.plan.lanes import kept_lanes
from atoll.plan.links import CROWD, Lines, Links, measured_lines, measured_links, without
from atoll.plan.price import contributing, loads
from atoll.plan.relays import whom_to_drop
from atoll.values import Lane, PlanChoice, PlanRequest


def choose(request: PlanRequest) -> PlanChoice:
    """The lanes for a request. ValueError for a topology that does not exist, naming those that do.

    Members that no lane can serve are dropped (`PlanChoice.dropped`), the lanes are then the others'.
    """
    if request.topology not in TOPOLOGIES:
        raise ValueError(f"unknown topology {request.topology!r}; there are {', '.join(TOPOLOGIES)}")
    members = tuple(sorted(request.members))
    if len(members) > CROWD and not request.broken and request.topology in ("auto", "direct"):
        return plan_crowd(measured_lines(members, request.links, request.max_up, request.max_down), request)
    links = measured_links(members, request.links, request.max_up, request.max_down)
    links = without(links, request.broken)
    most = most_re_encodings(request.codec)
    dropped = _whom_to_drop(request.members, links, None if most is None else most + 1)
    if dropped:
        left = tuple(member for member in request.members if member not in dropped)
        contributors = tuple(each for each in request.contributors if each not in dropped)
        rest = choose(replace(request, members=left, contributors=contributors))
        return replace(rest, dropped=dropped | rest.dropped)
    return plan_over(links, request)


def plan_over(links: Links, request: PlanRequest) -> PlanChoice:
    """The lanes over these links, all members of which can be served."""
    if len(links) == 1:
        return PlanChoice(frozenset(), (Lane(links.members[0]),), reason="direct: there is one member")
    task = Task(
        links, request.wire_bytes, request.codec, request.contributors or links.members, request.connections
    )
    kept = _kept(task, request)
    found = [kept] if kept else _candidates(task, request.topology)
    rough = _best(found, request.topology)
    best, streams = _settled(task, rough, cuts_stay=kept is not None)
    return PlanChoice(
        dropped=frozenset(),
        lanes=best.lanes,
        topology=best.topology,
        predicted_s=best.price.seconds,
        reason=_reason(
            best, [each for each in found if each is not rough], request, links.assumed, kept is not None
        ),
        connections=streams,
        chunk_bytes=best.chunk_bytes,
    )


def plan_crowd(lines: Lines, request: PlanRequest) -> PlanChoice:
    """Direct lanes for more members than single links are looked at."""
    contributes = contributing(lines.members, request.contributors or None)
    task = CrowdTask(lines, contributes, request.wire_bytes, request.codec, request.connections)
    kept, chunk_bytes = _kept_lanes(request, lines, contributes), 0
    if kept:
        assert request.previous is not None
        chunk_bytes = request.previous.chunk_bytes
        best = crowd_candidate(task, kept, chunk_bytes)
    else:
        best = crowd_direct(task)
    streams = crowd_connections(task, best.lanes, best.price.busy_s + best.price.last_s)
    return PlanChoice(
        dropped=frozenset(),
        lanes=best.lanes,
        topology="direct",
        predicted_s=best.price.seconds,
        reason=_reason(best, [], request, lines.assumed, bool(kept)),
        connections=streams,
        chunk_bytes=chunk_bytes
        or min(best.chunk_bytes, chunk_size(lines, best.lanes, request.wire_bytes, 1, streams)),
    )


def _whom_to_drop(members: Sequence[str], links: Links, most_hops: int | None) -> frozenset[str]:
    """`members` from oldest to youngest; ties go to the youngest."""
    if links.usable.sum() == len(members) * (len(members) - 1):
        return frozenset()
    order = [links.members.index(member) for member in members]
    usable = links.usable[np.ix_(order, order)]
    return frozenset(members[i] for i in whom_to_drop(usable, most_hops))


def _kept(task: Task, request: PlanRequest) -> Candidate | None:
    lanes = _kept_lanes(request, task.links, task.contributes)
    if not lanes:
        return None
    assert request.previous is not None
    return candidate(task, "direct", lanes, request.previous.chunk_bytes)


def _kept_lanes(request: PlanRequest, links: Links | Lines, contributes: np.ndarray) -> tuple[Lane, ...]:
    """The previous attempt's direct lanes, as far as their roots are there; () if nothing is to be kept."""
    previous = request.previous
    if previous is None or previous.codec != request.codec or request.topology not in ("auto", "direct"):
        return ()
    return kept_lanes(previous.lanes, links, contributes)


def _candidates(task: Task, topology: str) -> list[Candidate]:
    links = task.links
    if topology != "auto":
        forced = BUILDERS[topology](task)
        return [forced] if forced.lanes else [forced, BUILDERS["direct"](task), BUILDERS["relay"](task)]
    found = [BUILDERS["direct"](task)]
    all_reach_all = int(links.usable.sum()) == len(links) * (len(links) - 1)
    if 2 < len(links) <= CROWD:
        found += [BUILDERS["ring"](task), BUILDERS["two-level"](task)]
    if not all_reach_all and (len(links) <= CROWD or not found[0].lanes):
        found.append(BUILDERS["relay"](task))
    return found


def _best(found: Sequence[Candidate], topology: str) -> Candidate:
    able = [each for each in found if each.lanes]
    if topology != "auto" and able and able[0].topology == topology:
        return able[0]
    fastest = min(able, key=lambda each: each.price.seconds)
    direct = next((each for each in able if each.topology == "direct"), fastest)
    return fastest if is_clearly_faster(fastest, direct) else direct


def _settled(task: Task, rough: Candidate, *, cuts_stay: bool) -> tuple[Candidate, int]:
    """The candidate with as many connections as it needs, and that number, chunks that suit them, and the price of
    just that. Each follows from the others, so it takes a second round. A retry keeps its cuts."""
    moved = loads(task.links.members, rough.lanes, task.wire_bytes, task.contributes).links
    best, streams, chunk_bytes = rough, task.num_connections, rough.chunk_bytes
    for _ in range(2):
        seconds = best.price.busy_s + best.price.last_s
        streams = task.num_connections or connections(task.links, moved, seconds)
        if not cuts_stay:
            suits = chunk_size(task.links, rough.lanes, task.wire_bytes, 1, streams)
            chunk_bytes = min(rough.chunk_bytes, suits)
        best = candidate(task, rough.topology, rough.lanes, chunk_bytes)
    exactly = replace(task, num_connections=streams)
    return candidate(exactly, rough.topology, rough.lanes, chunk_bytes), streams


def _reason(
    best: Candidate, others: Sequence[Candidate], request: PlanRequest, assumed: str, kept: bool
) -> str:
    instead = [
        f"{each.topology} {each.price.seconds:.3g} s" if each.lanes else f"no {each.topology}: {each.why_not}"
        for each in sorted(others, key=lambda each: (not each.lanes, each.price.seconds))
    ]
    how = "kept from the attempt before" if kept else f"bounded by {best.price.bottleneck}"
    if request.topology == best.topology:
        how = f"as asked for, {how}"
    notes = "; ".join([*instead, *([assumed] if assumed else [])])
    return f"{best.topology}: about {best.price.seconds:.3g} s, {how}" + (f" ({notes})" if notes else "")
