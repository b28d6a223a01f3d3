"""What a set of lanes costs: one function for every topology, and for the benchmarks.

Chunks flow: all links are busy at once, contributions and finished bytes share them. So the time is that of the
busiest resource (an access line, a link, or a member's codec), plus one way of the last chunk up its tree and down
again: delays, and the time of one chunk on each hop. A round comes after a pause, so TCP has to get under way first:
what the busiest line loses by that is added. Where a way is known to lose packets, its streams carry what they keep on
it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from atoll.plan.connections import (
    MOST,
    MOST_UNDER_LOSS,
    SEGMENT_BYTES,
    connections,
    start_seconds,
    stream_bytes,
)
from atoll.plan.grid import Int64s
from atoll.plan.links import Floats, Links
from atoll.plan.shapes import Tree, sends
from atoll.values import CODECS, Lane

CODEC_ELEMENTS_PER_S = 1_000_000_000
"""What a member's workers are taken to decode, add or encode per second, together; links are nearly always slower."""


SLOWEST = 0.5
"""Under loss windows differ: the smallest of several has about this part of the mean."""


@dataclass(frozen=True)
class Load:
    """Bytes that lanes move: `links[i, j]` from i to j, and what member i's codec reads and writes, `codec[i]`."""

    links: Floats
    codec: Floats


@dataclass(frozen=True)
class Price:
    """`busy_s`: the busiest resource, named by `bottleneck`. `last_s`: the last chunk's way up and down. `start_s`:
    what that resource loses while TCP gets under way."""

    busy_s: float
    last_s: float
    bottleneck: str
    start_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.busy_s + self.last_s + self.start_s


def price(
    links: Links,
    lanes: Sequence[Lane],
    wire_bytes: int,
    *,
    codec: str,
    chunk_bytes: int = 1 << 20,
    contributors: Collection[str] | None = None,
    num_connections: int = 0,
) -> Price:
    """Predicted seconds of one attempt of `wire_bytes` (the whole encoded vector); infinite over an unusable link.

    `contributors` are names (None: all members). `num_connections` between two members, 0: the planner's choice.
    ValueError if a lane is no tree over the members.
    """
    if len(links) == 1 or not lanes:
        return Price(0.0, 0.0, "nothing")
    contributes = contributing(links.members, contributors)
    load = loads(links.members, lanes, wire_bytes, contributes)
    seconds = busy_seconds(links, load, codec, num_connections)
    bottleneck = max(seconds, key=lambda name: float(seconds[name].max()))
    busy_s = float(seconds[bottleneck].max())
    where = np.unravel_index(int(np.argmax(seconds[bottleneck])), seconds[bottleneck].shape)
    place = tuple(int(i) for i in where)
    slowed = _slowed_by_losses(links, chunk_bytes, num_connections or MOST_UNDER_LOSS)
    last_s = _last_s(slowed, lanes, wire_bytes, chunk_bytes, contributes)
    num_connections = num_connections or connections(links, load.links, busy_s + last_s)
    start_s = _start_s(links, load, bottleneck, place, busy_s, num_connections)
    names = " to ".join(links.members[i] for i in place)
    if bottleneck == "the link" and links.loss is not None and links.loss[place] > 0:
        names += f", which loses {100 * links.loss[place]:.2g} % of its packets"
    return Price(busy_s, last_s, f"{bottleneck} of {names}", start_s)


def contributing(members: Sequence[str], contributors: Collection[str] | None) -> np.ndarray:
    named = set(members if contributors is None else contributors)
    return np.asarray([member in named for member in members])


def busy_seconds(links: Links, load: Load, codec: str, num_connections: int = 0) -> dict[str, Floats]:
    """Seconds that each resource is busy, by kind: uplinks, downlinks, links (a matrix), codecs. A link carries no more
    than its connections keep on the way; 0: as many as there may be."""
    spec = CODECS[codec]
    most = num_connections or (
        MOST if links.loss is None else np.where(links.loss > 0, MOST_UNDER_LOSS, MOST)
    )
    rate = np.minimum(np.where(links.usable, links.rate, 0), most * _stream_rate(links))
    codec_rate = CODEC_ELEMENTS_PER_S * spec.block_bytes(spec.block) / spec.block
    with np.errstate(divide="ignore", invalid="ignore"):
        per_link = np.where(load.links > 0, load.links / rate, 0.0)
    return {
        "the uplink": load.links.sum(axis=1) / links.up,
        "the downlink": load.links.sum(axis=0) / links.down,
        "the link": per_link,
        "the codec": load.codec / codec_rate,
    }


def _stream_rate(links: Links) -> Floats:
    """What one stream of each link carries at the most."""
    return stream_bytes(links) / np.maximum(links.delay_s + links.delay_s.T, 1e-9)


def _start_s(
    links: Links, load: Load, bottleneck: str, place: tuple[int, ...], busy_s: float, num_connections: int
) -> float:
    """What the busiest line or link loses at first, all flows over it together; a codec loses nothing."""
    if bottleneck == "the codec":
        return 0.0
    where = (slice(None), place[0]) if bottleneck == "the downlink" else place
    moved = np.atleast_1d(load.links[where])
    rtt_s = np.atleast_1d((links.delay_s + links.delay_s.T)[where])
    flows = moved > 0
    if not flows.any() or not np.isfinite(busy_s):
        return 0.0
    total = float(moved.sum())
    return start_seconds(total, total / busy_s, float(rtt_s[flows].max()), num_connections * int(flows.sum()))


def loads(members: Sequence[str], lanes: Sequence[Lane], wire_bytes: int, contributes: np.ndarray) -> Load:
    """Bytes on every link and through every codec; one matrix for all stars together."""
    n, total = len(members), sum(lane.share for lane in lanes)
    index = {member: i for i, member in enumerate(members)}
    moved, codec, rooted = np.zeros((n, n)), np.full(n, float(wire_bytes)), np.zeros(n)
    for lane in lanes:
        part = wire_bytes * lane.share / total
        if lane.up or lane.down:
            _add_tree(moved, codec, Tree.of(lane, members), part, contributes)
        else:
            rooted[index[lane.root]] += part
    moved += contributes[:, None] * rooted[None, :] + rooted[:, None]
    codec += rooted * (contributes.sum() + 1)
    np.fill_diagonal(moved, 0.0)
    return Load(moved, codec)


def _add_tree(moved: Floats, codec: Floats, tree: Tree, part: float, contributes: np.ndarray) -> None:
    nodes = np.arange(len(tree.up))
    senders, below = nodes[sends(tree, contributes)], nodes[nodes != tree.root]
    np.add.at(moved, (senders, tree.up[senders]), part)
    np.add.at(moved, (tree.down[below], below), part)
    np.add.at(codec, tree.up[senders], part)  # decoded there
    inner = np.unique(np.append(tree.up[senders], tree.root))  # where sums are made: own update in, sum out
    codec[inner] += part * (1 + contributes[inner])


def _slowed_by_losses(links: Links, chunk_bytes: int, num_connections: int) -> Links:
    """The links as the last chunks see them: each goes over one stream, one of them over the slowest, and if any of
    their packets is lost the end waits a round trip for it."""
    if links.loss is None:
        return links
    packets = num_connections * chunk_bytes / SEGMENT_BYTES
    again_s = (1 - (1 - links.loss) ** packets) * (links.delay_s + links.delay_s.T)
    slowest = _stream_rate(links) * (SLOWEST if num_connections > 1 else 1)
    alone = np.where(links.loss > 0, slowest, np.inf)
    rate = np.minimum(links.rate, np.maximum(alone, 1)).astype(np.int64)
    return replace(links, rate=np.where(links.rate > 0, rate, 0), delay_s=links.delay_s + again_s)


def _last_s(
    links: Links, lanes: Sequence[Lane], wire_bytes: int, chunk_bytes: int, contributes: np.ndarray
) -> float:
    """The longest way of a chunk from a contributor to a root and on to a member, over all lanes."""
    total, index = sum(lane.share for lane in lanes), {member: i for i, member in enumerate(links.members)}
    flow = np.maximum(links.flow, 1)
    np.fill_diagonal(flow, np.iinfo(np.int64).max)  # to oneself there is no way to go
    longest_s = 0.0
    roots, chunks = [], []
    for lane in lanes:
        chunk = min(chunk_bytes, wire_bytes * lane.share / total)
        if lane.up or lane.down:
            tree = Tree.of(lane, links.members)
            up_s = way_seconds(tree.up, links.delay_s, flow, chunk)[contributes]
            down_s = way_seconds(tree.down, links.delay_s.T, flow.T, chunk)
            longest_s = max(longest_s, float(up_s.max(initial=0.0) + down_s.max(initial=0.0)))
        else:
            roots.append(index[lane.root])
            chunks.append(chunk)
    return max(longest_s, _last_of_stars(links, flow, roots, np.asarray(chunks), contributes))


def _last_of_stars(
    links: Links, flow: Int64s, roots: list[int], chunks: Floats, contributes: np.ndarray
) -> float:
    """The same over all stars at once: with a thousand members one by one would take longer than all else."""
    if not roots:
        return 0.0
    chunk = np.zeros(len(links))
    np.maximum.at(chunk, roots, chunks)
    up_s = links.delay_s + chunk[None, :] / flow
    if not contributes.all():
        up_s = up_s[contributes]
    down_s = links.delay_s + chunk[:, None] / flow
    both_s = up_s.max(axis=0, initial=0.0) + down_s.max(axis=1, initial=0.0)
    return float(both_s[roots].max())


def way_seconds(parents: Int64s, delay_s: Floats, flow: Int64s, chunk: float) -> Floats:
    """Seconds of one chunk from each node to the root, hop by hop; pointers are doubled, chains may be long."""
    nodes = np.arange(len(parents))
    way_s = np.where(parents == nodes, 0.0, delay_s[nodes, parents] + chunk / flow[nodes, parents])
    reach = parents
    for _ in range(len(parents).bit_length()):
        way_s, reach = way_s + way_s[reach], reach[reach]
    return way_s
