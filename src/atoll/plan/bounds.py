"""What no all-reduce can beat on a network: the yardstick beside every predicted and measured time.

`own`: a member's update leaves it once, and the result reaches it once. `balanced`: the C contributions merge in at
least C - 1 transfers of the vector, and N - 1 spread the result; all uplinks together, or all downlinks, carry them.
For N equal members that is 2 V (N - 1) / (N b). `cut`: the sum of either side of a cut crosses it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.plan.links import Links
from atoll.plan.price import contributing
from atoll.plan.regions import region_cuts

_ALL_CUTS = 12
"""So many members have 2047 cuts; of more, only those around one member and around found regions are looked at."""


@dataclass(frozen=True)
class Bounds:
    """Seconds, propagation not included: add one round trip of the longest link for that."""

    own_s: float
    balanced_s: float
    cut_s: float

    @property
    def seconds(self) -> float:
        return max(self.own_s, self.balanced_s, self.cut_s)


def bounds(links: Links, wire_bytes: int, contributors: tuple[str, ...] | None = None) -> Bounds:
    """For an exact all-reduce of `wire_bytes` (the encoded vector), both directions of a line used at once."""
    n = len(links)
    contributes = contributing(links.members, contributors)
    num = int(contributes.sum())
    if n < 2 or num == 0:
        return Bounds(0.0, 0.0, 0.0)
    hears = num - contributes > 0  # of somebody else's update
    sent_s, heard_s = wire_bytes / links.up[contributes], wire_bytes / links.down[hears]
    transfers = num - 1 + n - 1
    balanced = wire_bytes * transfers / min(int(links.up.sum()), int(links.down.sum()))
    own_s = float(max(sent_s.max(initial=0.0), heard_s.max(initial=0.0)))
    return Bounds(own_s, balanced, _cut_s(links, wire_bytes, contributes))


def _cut_s(links: Links, wire_bytes: int, contributes: np.ndarray) -> float:
    rate = np.where(links.usable, links.rate, 0)
    longest = 0.0
    for inside in _cuts(links):
        for side in (inside, ~inside):
            if contributes[side].any():
                crossing = int(rate[np.ix_(side, ~side)].sum())
                longest = max(longest, wire_bytes / crossing if crossing else np.inf)
    return longest


def _cuts(links: Links) -> list[np.ndarray]:
    n = len(links)
    if n <= _ALL_CUTS:
        sets = np.arange(1, 1 << (n - 1))
        return [((each >> np.arange(n)) & 1).astype(bool) for each in sets]
    cuts = [np.arange(n) == i for i in range(n)]
    for regions in region_cuts(links):
        cuts += [np.isin(np.arange(n), region) for region in regions]
    return cuts
