"""How many inner steps each member makes in the next round, so that all are ready together. Pure.

With `outer.steps_by_speed` the fastest member makes the round's own number of steps, and each of the others as many as
it can in that time, by the speed that its last `ready` told. The run's step goes on by the round's own number for
everybody; weights by tokens make up for the difference in work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from atoll.membership.messages import Ready

FLOOR: Final = 8
"""Nobody makes fewer than a FLOORth of the round's steps: an update of next to no work is noise."""
ALIKE: Final = 0.9
"""Speeds that differ by less are the same: a machine's own unrest is no reason to train less."""


def steps_by_speed(readies: Mapping[str, Ready]) -> dict[str, int]:
    """The next round's inner steps of each member whose speed is known; the others make the round's own number."""
    round_steps = max((ready.round_steps for ready in readies.values()), default=0)
    speeds = {
        peer: ready.steps / ready.train_s
        for peer, ready in readies.items()
        if ready.steps > 0 and ready.train_s > 0
    }
    if round_steps <= 0 or not speeds:
        return {}
    fastest = max(speeds.values())
    return {peer: _steps(round_steps, speed / fastest) for peer, speed in sorted(speeds.items())}


def _steps(round_steps: int, share: float) -> int:
    if share >= ALIKE:
        return round_steps
    return max(1, -(-round_steps // FLOOR), round(round_steps * share))
