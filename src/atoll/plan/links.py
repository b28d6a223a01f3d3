"""What the planner knows of the links between members: rates, caps and delays, by index into the sorted members.

Rates are whole bytes per second, 0 where a link cannot be used. A pair can be used only if both of its directions
can. What nobody has measured is taken to be like what was measured: the median, or, before the first round, the
defaults below; `assumed` says so in words.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from atoll.plan.grid import Int64s
from atoll.values import Edge, LinkRate

DEFAULT_BYTES_PER_S = 12_500_000
"""100 Mbit/s: what an uplink or a downlink is taken to carry while none of the run's was measured."""
DEFAULT_RTT_S = 0.05
_MOST_BYTES_PER_S, _LONGEST_RTT_S = 10**12, 60.0

CROWD = 64
"""Above so many members single links are not spoken of, only lines: they would be a million for a thousand members."""

SHARED = 0.7
"""A link that was seen to carry at least this part of its even share of an access line was limited by that line."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Lines:
    """A crowd's links: each is as good as the lines at its ends, and all have one delay, one way."""

    members: tuple[str, ...]
    up: Int64s
    down: Int64s
    delay_s: float
    assumed: str = ""

    def __len__(self) -> int:
        return len(self.members)


@dataclass(frozen=True)
class Links:
    """`rate[i, j]` from i to j; `up[i]` and `down[i]` bound the sums of a member; `delay_s[i, j]` one way."""

    members: tuple[str, ...]
    rate: Int64s
    up: Int64s
    down: Int64s
    delay_s: Floats
    assumed: str = ""
    loss: Floats | None = None
    """`loss[i, j]` from i to j: the share of packets that the way loses by itself; None: none that is known."""

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def usable(self) -> NDArray[np.bool_]:
        """Symmetric; nobody has a link to itself."""
        both = (self.rate > 0) & (self.rate.T > 0)
        np.fill_diagonal(both, False)
        return both

    @cached_property
    def flow(self) -> Int64s:
        """What one flow alone could carry: its link and the access lines at its ends; 0 where unusable."""
        alone = np.minimum(self.rate, np.minimum(self.up[:, None], self.down[None, :]))
        return np.where(self.usable, alone, 0)


def carried_at_once(seen: Iterable[LinkRate]) -> tuple[LinkRate, ...]:
    """What several ranks saw of the same links, as one: rates add up; of round trips the shortest known counts, since
    the others have queues in them. They share the way, and what it loses."""
    links: dict[tuple[str, str], LinkRate] = {}
    for link in seen:
        if (other := links.get((link.source, link.target))) is not None:
            rtt_s = min(link.rtt_s or other.rtt_s, other.rtt_s or link.rtt_s)
            loss = max(link.loss, other.loss)
            link = LinkRate(link.source, link.target, link.bytes_per_s + other.bytes_per_s, rtt_s, loss)
        links[link.source, link.target] = link
    return tuple(links.values())


def without(links: Links, broken: Collection[Edge]) -> Links:
    """The same links less the broken ones; a pair that is broken one way cannot be used at all."""
    index = {member: i for i, member in enumerate(links.members)}
    rate = links.rate.copy()
    for edge in broken:
        if edge.source in index and edge.target in index:
            i, j = index[edge.source], index[edge.target]
            rate[i, j] = rate[j, i] = 0
    return replace(links, rate=rate)


def measured_links(
    members: Sequence[str],
    seen: Sequence[LinkRate],
    max_up: Mapping[str, int] | None = None,
    max_down: Mapping[str, int] | None = None,
) -> Links:
    """From what was seen to what a link could carry alone. `members` sorted; caps in bytes per second, 0: none.

    Flows that ran side by side share a line: what each was seen to carry bounds the line from below, and is the
    link's own limit only if it lies well under an even share of the lines at both of its ends.
    """
    pairs, ups, downs, rtt_s, loss = _tables(members, seen)
    up = _lines(np.maximum(ups, pairs.max(axis=1, initial=0)), members, max_up or {})
    down = _lines(np.maximum(downs, pairs.max(axis=0, initial=0)), members, max_down or {})
    alone = np.minimum(up[:, None], down[None, :])
    rate = np.maximum(alone, 1)
    if pairs.any():
        sent, received = (pairs > 0).sum(axis=1), (pairs > 0).sum(axis=0)
        own_limit = (
            (pairs > 0)
            & (pairs * sent[:, None] < SHARED * up[:, None])
            & (pairs * received[None, :] < SHARED * down[None, :])
        )
        rate = np.where(own_limit, pairs, rate)
    known_rtt = rtt_s[rtt_s > 0]
    delay_s = np.where(rtt_s > 0, rtt_s, np.median(known_rtt) if known_rtt.size else DEFAULT_RTT_S) / 2
    np.fill_diagonal(delay_s, 0.0)
    assumed = _assumed(ups, downs, pairs, up, len(members))
    return Links(tuple(members), rate, up, down, delay_s, assumed, loss if loss.any() else None)


def measured_lines(
    members: Sequence[str],
    seen: Sequence[LinkRate],
    max_up: Mapping[str, int] | None = None,
    max_down: Mapping[str, int] | None = None,
) -> Lines:
    """The same for a crowd; the delay is that of the longest round trip that was seen."""
    n = len(members)
    source, target, rate, trip_s, _ = _columns(members, seen)
    known = (source <= n) & (target <= n) & (source != target)
    ups, downs = np.zeros(n + 2, dtype=np.int64), np.zeros(n + 2, dtype=np.int64)
    np.maximum.at(ups, source[known], rate[known])
    np.maximum.at(downs, target[known], rate[known])
    ups, downs = ups[:n], downs[:n]
    up, down = _lines(ups, members, max_up or {}), _lines(downs, members, max_down or {})
    longest_s = float(trip_s[known].max(initial=0.0)) or DEFAULT_RTT_S
    if not ups.any() and not downs.any():
        assumed = f"nothing measured yet, {up.max() * 8 / 1e6:g} Mbit/s assumed"
    else:
        unseen = int((ups == 0).sum() + (downs == 0).sum())
        assumed = f"{unseen} of {2 * n} lines not measured" if unseen else ""
    return Lines(tuple(members), up, down, longest_s / 2, assumed)


def _tables(
    members: Sequence[str], seen: Sequence[LinkRate]
) -> tuple[Int64s, Int64s, Int64s, Floats, Floats]:
    """(pairs, uplinks, downlinks, round trips, losses), 0 where not known. Index n: ""; n + 1: no member."""
    n = len(members)
    source, target, rate, trip_s, lost = _columns(members, seen)
    rates, trips_s = np.zeros((n + 2, n + 2), dtype=np.int64), np.zeros((n + 2, n + 2))
    loss = np.zeros((n + 2, n + 2))
    rates[source, target], trips_s[source, target], loss[source, target] = rate, trip_s, lost
    pairs, rtt_s = rates[:n, :n].copy(), trips_s[:n, :n]
    np.fill_diagonal(pairs, 0)
    return pairs, rates[:n, n], rates[n, :n], np.where(rtt_s > 0, rtt_s, rtt_s.T), loss[:n, :n]


def _columns(
    members: Sequence[str], seen: Sequence[LinkRate]
) -> tuple[Int64s, Int64s, Int64s, Floats, Floats]:
    """(source, target, rate, round trip, loss) of each report. Index n stands for "", n + 1 for no member."""
    n = len(members)
    index = {member: i for i, member in enumerate(members)} | {"": n}
    source = np.asarray([index.get(link.source, n + 1) for link in seen], dtype=np.int64)
    target = np.asarray([index.get(link.target, n + 1) for link in seen], dtype=np.int64)
    bytes_per_s = np.asarray([link.bytes_per_s for link in seen], dtype=np.float64)
    rate = np.clip(np.round(bytes_per_s), 1, _MOST_BYTES_PER_S).astype(np.int64)
    trip_s = np.clip(np.asarray([link.rtt_s for link in seen], dtype=np.float64), 0.0, _LONGEST_RTT_S)
    loss = np.clip(np.asarray([link.loss for link in seen], dtype=np.float64), 0.0, 1.0)
    return source, target, rate, trip_s, loss


def _lines(seen: Int64s, members: Sequence[str], caps: Mapping[str, int]) -> Int64s:
    """Access lines: as seen, else as capped, else as others were seen; never above the cap."""
    cap = np.asarray([min(max(0, caps.get(each, 0)), _MOST_BYTES_PER_S) for each in members], dtype=np.int64)
    usual = int(np.median(seen[seen > 0])) if (seen > 0).any() else DEFAULT_BYTES_PER_S
    lines = np.where(seen > 0, seen, np.where(cap > 0, cap, usual))
    return np.where(cap > 0, np.minimum(lines, cap), lines)


def _assumed(ups: Int64s, downs: Int64s, pairs: Int64s, up: Int64s, n: int) -> str:
    if n < 2:
        return ""
    if not pairs.any() and not ups.any() and not downs.any():
        return f"nothing measured yet, {up.max() * 8 / 1e6:g} Mbit/s assumed"
    unseen = int((pairs == 0).sum()) - n
    return f"{unseen} of {n * (n - 1)} links not measured" if unseen else ""
