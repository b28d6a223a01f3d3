"""How many connections join two members, and how large a chunk is.

One TCP stream carries at most a window per round trip, and under loss less still; so a pair needs as many as its
share of the traffic takes. On a long way it has many more than that. A round comes after a pause, and then TCP begins
with 14 kB a stream and doubles every round trip: sixteen streams are there two round trips before four. And a lost
packet slows one of them only; how many get lost is not known beforehand. Once it is known, a way that loses many gets
as many streams as it takes: what it was seen to carry is only what so few could.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from atoll.plan.links import Floats, Lines, Links
from atoll.values import Lane

WINDOW_BYTES = 2 << 20
"""What one stream keeps on the way with the buffers of a stock Linux: half of the 4 MiB that it may take."""
SEGMENT_BYTES = 1448
STREAM_BYTES = 3 << 20
"""What one stream was seen to keep on the way at the most, with the same buffers (eight at 80 ms: 313 MB/s)."""
INITIAL_BYTES = 10 * SEGMENT_BYTES
"""What one stream sends before the first answer, when it begins and again after a pause."""
LONG_RTT_S = 0.01
LONG_WINDOW_BYTES = 128 << 10
"""What one stream is to keep on a long way: it has that after three doublings, and under losses too."""
ON_A_LONG_WAY = 4
MOST = 16
MOST_UNDER_LOSS = 32
MOST_PER_MEMBER = 512
MORE_UNDER_LOSS = 2
"""So many times what carries the rate that was seen: more may carry more, which the next round shows."""

SMALLEST_CHUNK, LARGEST_CHUNK = 32 << 10, 1 << 20
CHUNK_S = 0.05
CHUNKS_PER_HOP = 8
LINE_S = 0.25
"""So long the chunks that are under way on one line at once may take, one on each connection: the first sum waits for
about as much, and so does the end."""


def streams(bytes_per_s: float, rtt_s: float, loss: float = 0.0, window_bytes: int = WINDOW_BYTES) -> int:
    """TCP streams that carry this rate: each at most a window a round trip, and Mathis' bound under loss."""
    if bytes_per_s <= 0 or rtt_s <= 0:
        return 1
    each = window_bytes / rtt_s
    if loss > 0:
        each = min(each, float(_under_loss(loss)) / rtt_s)
    return max(1, math.ceil(bytes_per_s / each - 1e-9))


def stream_bytes(links: Links) -> Floats:
    """What one stream keeps on the way at the most; under loss by Mathis' law, which CUBIC follows where it matters."""
    most = np.full((len(links), len(links)), float(STREAM_BYTES))
    if links.loss is None:
        return most
    return np.minimum(most, np.maximum(_under_loss(links.loss), SEGMENT_BYTES))


def _under_loss(loss: Floats | float) -> Floats:
    """Mathis et al. 1997, in bytes a round trip."""
    return np.asarray(SEGMENT_BYTES * np.sqrt(1.5 / np.maximum(loss, 1e-12)))


def start_seconds(num_bytes: float, bytes_per_s: float, rtt_s: float, num_streams: int) -> float:
    """What is lost while streams get under way: together they double what they send with every round trip, from
    INITIAL_BYTES each, up to the rate; by then they have sent about one round trip's worth of it."""
    initial = num_streams * INITIAL_BYTES
    full = bytes_per_s * rtt_s
    if full <= initial:
        return 0.0
    if num_bytes < full - initial:  # it is over before that
        return max(0.0, rtt_s * math.log2(1 + num_bytes / initial) - num_bytes / bytes_per_s)
    return rtt_s * (math.log2(full / initial) - 1 + initial / full)


def connections(links: Links, moved: Floats, seconds: float) -> int:
    """For a plan that moves `moved[i, j]` bytes in `seconds`: as many as the link with most on the way needs."""
    used = (moved > 0) & links.usable
    if len(links) < 2 or not used.any() or seconds <= 0:
        return 1
    rtt_s = links.delay_s + links.delay_s.T
    on_the_way = np.where(used, moved / seconds * rtt_s, 0.0)  # rate x RTT
    i, j = np.unravel_index(int(np.argmax(on_the_way)), on_the_way.shape)
    needed = connections_for(
        float(moved[i, j] / seconds), float(rtt_s[i, j]), float(rtt_s[used].max()), len(links)
    )
    return max(needed, _connections_under_loss(links, on_the_way))


def _connections_under_loss(links: Links, on_the_way: Floats) -> int:
    keeps = stream_bytes(links)
    wanted = np.where(keeps < LONG_WINDOW_BYTES, MORE_UNDER_LOSS * on_the_way / keeps, 0.0)
    return min(math.ceil(float(wanted.max())), MOST_UNDER_LOSS, MOST_PER_MEMBER // (len(links) - 1))


def connections_for(bytes_per_s: float, rtt_s: float, longest_rtt_s: float, num_members: int) -> int:
    """By the link with most on the way, and whether any is long."""
    window_bytes = LONG_WINDOW_BYTES if rtt_s >= LONG_RTT_S else WINDOW_BYTES
    needed = streams(bytes_per_s, rtt_s, window_bytes=window_bytes)
    if longest_rtt_s >= LONG_RTT_S:
        needed = max(needed, ON_A_LONG_WAY)
    return max(1, min(needed, MOST, MOST_PER_MEMBER // (num_members - 1)))


def chunk_size(
    links: Links | Lines, lanes: Sequence[Lane], wire_bytes: int, height: int, connections: int = 1
) -> int:
    """A power of two: so many chunks in a lane that its hops overlap and every connection has some, and none that
    holds up a slow link for long, nor all connections of a member together its line."""
    if len(links) < 2 or not lanes:
        return LARGEST_CHUNK
    if isinstance(links, Lines):
        slowest = int(min(links.up.min(), links.down.min()))
    else:
        slowest = int(links.flow[links.usable].min(initial=np.iinfo(np.int64).max))
    per_lane = wire_bytes * max(lane.share for lane in lanes) / sum(lane.share for lane in lanes)
    flows = connections * _most_partners(lanes, len(links))
    wanted = min(
        slowest * CHUNK_S, slowest * LINE_S / flows, per_lane / (CHUNKS_PER_HOP * height * connections)
    )
    largest = 1 << max(0, int(wanted).bit_length() - 1)
    return min(max(largest, SMALLEST_CHUNK), LARGEST_CHUNK)


def _most_partners(lanes: Sequence[Lane], num_members: int) -> int:
    """To how many others one member sends at most; in a star the root sends to all."""
    targets: set[tuple[int, int]] = set()
    for lane in lanes:
        if not lane.up or not lane.down:
            return num_members - 1
        targets |= {pair for pair in enumerate(lane.up) if pair[0] != pair[1]}
        targets |= {(above, below) for below, above in enumerate(lane.down) if above != below}
    return max(Counter(source for source, _ in targets).values(), default=1)
