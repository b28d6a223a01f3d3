"""How much of the vector each lane carries: fractions that make the busiest resource least busy, then integers.

For stars the best fractions have a closed form once the time is given: in time T a member that is root for the
fraction f sends `contributes * (1 - f) + (N - 1) * f` vectors and receives `(1 - f) + (C - contributes) * f`, so each
line bounds f by itself; T is found by bisection. For any other trees a few hundred small steps come close enough.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from atoll.plan.links import Floats, Lines, Links

SEATS_PER_LANE = 256
"""Shares are multiples of one in so many per lane: finer than what rates are known to."""
_VOTES = 1 << 40
_STEPS = 200


def star_fractions(links: Links | Lines, roots: Sequence[int], contributes: np.ndarray) -> Floats:
    """The fraction of the vector that each of `roots` (indices) should finish; it sums to 1. A slow one may get 0.

    Only the members' own lines count here, not limits of single links.
    """
    can = np.zeros(len(links), dtype=bool)
    can[list(roots)] = True
    if can.sum() <= 1 or len(links) == 1:
        return np.where(can, 1.0, 0.0)[list(roots)]
    least, most = 0.0, 1.0 / float(min(links.up.min(), links.down.min()))
    while _most(links, can, contributes, most).sum() < 1:
        least, most = most, 2 * most
    for _ in range(60):
        middle = (least + most) / 2
        enough = _most(links, can, contributes, middle).sum() >= 1
        least, most = (least, middle) if enough else (middle, most)
    fractions = _most(links, can, contributes, most)[list(roots)]
    return fractions / fractions.sum()


def _most(links: Links | Lines, can: np.ndarray, contributes: np.ndarray, per_byte_s: float) -> Floats:
    """The largest fractions that members can finish in `per_byte_s` seconds per byte of the vector; 0 if too slow."""
    n, num = len(links), int(contributes.sum())
    sends = contributes.astype(float)
    receives = num - sends  # contributions that come in, as a root of everything
    up, down = per_byte_s * links.up, per_byte_s * links.down
    by_up = np.divide(up - sends, n - 1 - sends, out=np.where(up >= sends, 1.0, 0.0), where=n - 1 > sends)
    by_down = np.divide(down - 1, receives - 1, out=np.ones(n), where=receives > 1)
    return np.where(can, np.clip(np.minimum(by_up, by_down), 0.0, 1.0), 0.0)


def balance(costs: Floats) -> Floats:
    """Fractions of the lanes (columns) for which the busiest resource (row) is busy for the shortest time, nearly.

    `costs[r, l]` is how long resource r is busy if lane l carries everything. Exponentiated gradient on a soft
    maximum that grows harder; the best fractions seen are returned, even ones at the least.
    """
    num = costs.shape[1]
    fractions = best = np.full(num, 1.0 / num)
    shortest = float((costs @ best).max())
    for step in range(_STEPS):
        busy = costs @ fractions
        sharpness = (10 + step) / busy.max()
        weight = np.exp(sharpness * (busy - busy.max()))
        slope = (weight / weight.sum()) @ costs
        fractions = fractions * np.exp(-slope / slope.max() / (1 + step / 20))
        fractions = fractions / fractions.sum()
        longest = float((costs @ fractions).max())
        if longest < 0.999 * shortest:
            shortest, best = longest, fractions
    return best


def whole_shares(fractions: Sequence[float] | Floats, seats: int | None = None) -> list[int]:
    """`seats` handed out by Hagenbach-Bischoff: a quota first, the rest to the highest averages, ties to the first.

    Without `seats`: SEATS_PER_LANE for each that gets any, then divided by the common divisor: even fractions give
    ones.
    """
    sum_ = float(sum(fractions))
    votes = [round(float(each) / sum_ * _VOTES) for each in fractions]
    if seats is None and min(votes) == max(votes):
        return [1] * len(votes)
    wanted = SEATS_PER_LANE * sum(each > 0 for each in votes) if seats is None else seats
    total = sum(votes)
    given = [each * (wanted + 1) // total for each in votes]
    while sum(given) > wanted:  # every quotient came out whole: the last one with a seat returns it
        given[max(i for i, held in enumerate(given) if held)] -= 1
    averages = [(_average(each, held), i) for i, (each, held) in enumerate(zip(votes, given, strict=True))]
    heapq.heapify(averages)
    for _ in range(wanted - sum(given)):
        _, winner = averages[0]
        given[winner] += 1
        heapq.heapreplace(averages, (_average(votes[winner], given[winner]), winner))
    divisor = int(np.gcd.reduce(given)) if seats is None else 1
    return [each // divisor for each in given]


def _average(votes: int, held: int) -> int:
    """The votes for each seat, should there be one more; negative, for a heap. Two that differ do so by more than
    2^-64, as long as nobody holds 2^30 seats."""
    return -((votes << 64) // (held + 1))
