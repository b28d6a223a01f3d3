"""Direct lanes for a crowd, priced by sums over its members: nothing here has an entry for each pair of them.

A link is taken for as good as the lines at its ends, so no link is busier than one of these, and what
`atoll.plan.price` finds in matrices are sums: a root of the fraction f of the vector sends its own update to the other
roots and its finished part to all others, and hears as much of theirs. For the same lines the prices are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atoll.plan.candidates import Candidate
from atoll.plan.connections import chunk_size, connections_for
from atoll.plan.grid import Int64s
from atoll.plan.lanes import equal_lanes, fitted_lanes
from atoll.plan.links import Floats, Lines
from atoll.plan.price import CODEC_ELEMENTS_PER_S, Price
from atoll.values import CODECS, Lane


def crowd_direct(lines: Lines, contributes: np.ndarray, wire_bytes: int, codec: str) -> Candidate:
    """Stars with equal shares, or by the members' lines, whichever are faster."""
    equal, by_lines = equal_lanes(lines), fitted_lanes(lines, contributes)
    even = len(by_lines) == len(equal) and len({lane.share for lane in by_lines}) == 1
    found = [
        crowd_candidate(lines, contributes, lanes, wire_bytes, codec)
        for lanes in ((equal,) if even else (equal, by_lines))
    ]
    return min(found, key=lambda each: each.price.seconds)


def crowd_candidate(
    lines: Lines,
    contributes: np.ndarray,
    lanes: Sequence[Lane],
    wire_bytes: int,
    codec: str,
    chunk_bytes: int = 0,
) -> Candidate:
    """Stars with their price, in chunks of `chunk_bytes` (0: of the size that suits them)."""
    chunk_bytes = chunk_bytes or chunk_size(lines, lanes, wire_bytes, 1)
    rooted = _rooted(lines, lanes, wire_bytes)
    last_s = _last_s(lines, contributes, lanes, wire_bytes, chunk_bytes)
    return Candidate(
        "direct", tuple(lanes), _price(lines, contributes, rooted, wire_bytes, codec, last_s), chunk_bytes
    )


def crowd_connections(
    lines: Lines, contributes: np.ndarray, lanes: Sequence[Lane], wire_bytes: int, seconds: float
) -> int:
    """By the link that carries most: a contributor's update to the largest other root, and its own part there."""
    rooted = _rooted(lines, lanes, wire_bytes)
    moved = float((rooted + np.where(contributes, _of_others(rooted, np.maximum), 0.0)).max())
    if moved <= 0 or seconds <= 0:
        return 1
    return connections_for(moved / seconds, 2 * lines.delay_s, 2 * lines.delay_s, len(lines))


def _rooted(lines: Lines, lanes: Sequence[Lane], wire_bytes: int) -> Floats:
    """How many bytes of the vector each member finishes."""
    rooted = np.zeros(len(lines))
    np.add.at(rooted, _roots(lines, lanes), _parts(lanes, wire_bytes))
    return rooted


def _price(
    lines: Lines, contributes: np.ndarray, rooted: Floats, wire_bytes: int, codec: str, last_s: float
) -> Price:
    n, num, spec = len(lines), int(contributes.sum()), CODECS[codec]
    elsewhere = wire_bytes - rooted
    codec_rate = CODEC_ELEMENTS_PER_S * spec.block_bytes(spec.block) / spec.block
    busy = {
        "the uplink": (contributes * elsewhere + (n - 1) * rooted) / lines.up,
        "the downlink": ((num - contributes) * rooted + elsewhere) / lines.down,
        "the codec": (wire_bytes + rooted * (num + 1)) / codec_rate,
    }
    bottleneck = max(busy, key=lambda name: float(busy[name].max()))
    where = int(np.argmax(busy[bottleneck]))
    return Price(float(busy[bottleneck].max()), last_s, f"{bottleneck} of {lines.members[where]}")


def _last_s(
    lines: Lines, contributes: np.ndarray, lanes: Sequence[Lane], wire_bytes: int, chunk_bytes: int
) -> float:
    """The longest way of a chunk from a contributor to a root and on to a member."""
    roots, chunk = _roots(lines, lanes), np.minimum(chunk_bytes, _parts(lanes, wire_bytes))
    slowest_up = _of_others(np.where(contributes, lines.up, np.inf), np.minimum)[roots]
    slowest_down = _of_others(lines.down.astype(float), np.minimum)[roots]
    heard = np.isfinite(slowest_up)  # somebody else contributes
    up_s = np.where(heard, lines.delay_s + chunk / np.minimum(slowest_up, lines.down[roots]), 0.0)
    down_s = lines.delay_s + chunk / np.minimum(lines.up[roots], slowest_down)
    return float((up_s + down_s).max())


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
