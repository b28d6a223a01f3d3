"""The arithmetic of a schedule: what an outer step makes of a virtual state, and how long rounds are. Pure."""

from __future__ import annotations

import zlib

from atoll.values import Contribution


def next_digest(digest: str, step: int, contributions: tuple[Contribution, ...], result: str) -> str:
    """The state after a committed round that began at the run's `step`: a hash chain over what was committed.

    A real outer step depends on `step` through its schedule (learning rate, momentum, length), hence this one.
    """
    told = f"{digest}|{step}|{result}|{[(each.peer, each.weight) for each in contributions]}"
    return f"{zlib.crc32(told.encode()):08x}"


def steps_of_round(step: int) -> int:
    """How long the round is that begins at the run's `step`: a schedule whose stages differ in length."""
    return 2 if step < 6 else 5
