"""Direct lanes for a crowd, priced by sums over its members: nothing here has an entry for each pair of them.

A link is taken for as good as the lines at its ends, so no link is busier than one of these, and what
`atoll.plan.price` finds in matrices are sums: a root of the fraction f of the vector sends its own update to the other
roots and its finished part to all others, and hears as much of theirs. For the same lines the prices are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from atoll.plan.candidates import Candidate, is_clearly_faster
from atoll.plan.connections import chunk_size, connections_for, start_seconds
from atoll.plan.grid import Int64s
from atoll.plan.lanes import equal_lanes, fitted_lanes
from atoll.plan.links import Floats, Lines
from atoll.plan.price import CODEC_ELEMENTS_PER_S, Price
from atoll.values import CODECS, Lane


class CrowdTask(Struct, frozen=True):
    """What is to be reduced over which lines: `contributes` by member, `wire_bytes` one encoded vector;
    `num_connections` join two members, 0: the planner's choice.
    """

    lines: Lines
    contributes: np.ndarray
    wire_bytes: int
    codec: str
    num_connections: int = 0


def crowd_direct(task: CrowdTask) -> Candidate:
    """Stars with equal shares, or by the members' lines if those are clearly faster."""
    equal = crowd_candidate(task, equal_lanes(task.lines))
    by_lines = crowd_candidate(task, fitted_lanes(task.lines, task.contributes))
    return by_lines if is_clearly_faster(by_lines, equal) else equal


def crowd_candidate(task: CrowdTask, lanes: Sequence[Lane], chunk_bytes: int = 0) -> Candidate:
    """Stars with their price, in chunks of `chunk_bytes` (0: of the size that suits them)."""
    chunk_bytes = chunk_bytes or chunk_size(task.lines, lanes, task.wire_bytes, 1)
    return Candidate("direct", tuple(lanes), _price(task, lanes, chunk_bytes), chunk_bytes)


def crowd_connections(task: CrowdTask, lanes: Sequence[Lane], seconds: float) -> int:
    """As asked for, or by the link that carries most: a contributor's update to the largest other root, and its own
    part there."""
    if task.num_connections:
        return task.num_connections
    rooted, rtt_s = _rooted(task, lanes), 2 * task.lines.delay_s
    moved = float((rooted + np.where(task.contributes, _of_others(rooted, np.maximum), 0.0)).max())
    if moved <= 0 or seconds <= 0:
        return 1
    return connections_for(moved / seconds, rtt_s, rtt_s, len(task.lines))


def _price(task: CrowdTask, lanes: Sequence[Lane], chunk_bytes: int) -> Price:
    lines, contributes, rooted = task.lines, task.contributes, _rooted(task, lanes)
    n, num, spec = len(lines), int(contributes.sum()), CODECS[task.codec]
    elsewhere = task.wire_bytes - rooted
    moved = {
        "the uplink": contributes * elsewhere + (n - 1) * rooted,
        "the downlink": (num - contributes) * rooted + elsewhere,
        "the codec": task.wire_bytes + rooted * (num + 1),
    }
    codec_rate = CODEC_ELEMENTS_PER_S * spec.block_bytes(spec.block) / spec.block
    busy = {
        "the uplink": moved["the uplink"] / lines.up,
        "the downlink": moved["the downlink"] / lines.down,
        "the codec": moved["the codec"] / codec_rate,
    }
    bottleneck = max(busy, key=lambda name: float(busy[name].max()))
    where = int(np.argmax(busy[bottleneck]))
    busy_s, last_s = float(busy[bottleneck].max()), _last_s(task, lanes, chunk_bytes)
    start_s = 0.0
    if bottleneck != "the codec":
        flows = _flows(contributes, rooted, where, up=bottleneck == "the uplink")
        flows *= crowd_connections(task, lanes, busy_s + last_s)
        total = float(moved[bottleneck][where])
        start_s = start_seconds(total, total / busy_s, 2 * lines.delay_s, flows) if total else 0.0
    return Price(busy_s, last_s, f"{bottleneck} of {lines.members[where]}", start_s)


def _flows(contributes: np.ndarray, rooted: Floats, member: int, *, up: bool) -> int:
    """To how many others this member sends, or from how many it hears."""
    roots = rooted > 0
    if not up:
        partners = (contributes | roots) if roots[member] else roots
    elif roots[member]:
        return len(rooted) - 1
    else:
        partners = roots if contributes[member] else np.zeros_like(roots)
    return int(partners.sum()) - int(partners[member])


def _last_s(task: CrowdTask, lanes: Sequence[Lane], chunk_bytes: int) -> float:
    """The longest way of a chunk from a contributor to a root and on to a member."""
    lines, roots = task.lines, _roots(task.lines, lanes)
    chunk = np.minimum(chunk_bytes, _parts(lanes, task.wire_bytes))
    slowest_up = _of_others(np.where(task.contributes, lines.up, np.inf), np.minimum)[roots]
    slowest_down = _of_others(lines.down.astype(float), np.minimum)[roots]
    heard = np.isfinite(slowest_up)  # somebody else contributes
    up_s = np.where(heard, lines.delay_s + chunk / np.minimum(slowest_up, lines.down[roots]), 0.0)
    down_s = lines.delay_s + chunk / np.minimum(lines.up[roots], slowest_down)
    return float((up_s + down_s).max())


def _rooted(task: CrowdTask, lanes: Sequence[Lane]) -> Floats:
    """How many bytes of the vector each member finishes."""
    rooted = np.zeros(len(task.lines))
    np.add.at(rooted, _roots(task.lines, lanes), _parts(lanes, task.wire_bytes))
    return rooted


def _of_others(values: Floats, best: np.ufunc) -> Floats:
    """For each member the largest (or least, by `best`) of all others' values."""
    before = np.concatenate([values[:1], best.accumulate(values)[:-1]])
    after = np.concatenate([best.accumulate(values[::-1])[::-1][1:], values[-1:]])
    found = best(before, after)
    found[0], found[-1] = after[0], before[-1]
    return found


def _roots(lines: Lines, lanes: Sequence[Lane]) -> Int64s:
    index = {member: i for i, member in enumerate(lines.members)}
    return np.asarray([index[lane.root] for lane in lanes], dtype=np.int64)


def _parts(lanes: Sequence[Lane], wire_bytes: int) -> Floats:
    shares = np.asarray([lane.share for lane in lanes], dtype=float)
    return wire_bytes * shares / shares.sum()
