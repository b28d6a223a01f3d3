"""A shared limit on bytes per second."""

from __future__ import annotations

import asyncio
import time

import pytest

from atoll.recovery.pace import Pace
from support.slack import SLACK_S


async def move(pace: Pace, num_bytes: int) -> None:
    while num_bytes > 0:
        part = min(num_bytes, pace.at_once())
        await pace.take(part)
        num_bytes -= part


def test_together_they_keep_to_the_rate() -> None:
    async def run() -> float:
        pace, start_s = Pace(lambda: 1e6), time.monotonic()
        await asyncio.gather(*(move(pace, 100_000) for _ in range(4)))
        return time.monotonic() - start_s

    seconds = asyncio.run(run())
    assert seconds >= (400_000 - 2 * 50_000) / 1e6, "the first part and a moment's savings are free"
    assert seconds < 0.4 + SLACK_S


def test_without_a_limit_nobody_waits_and_parts_are_large() -> None:
    async def run() -> int:
        pace = Pace(lambda: 0.0)
        await move(pace, 10 << 30)
        return pace.at_once()

    assert asyncio.run(run()) == 256 << 10


@pytest.mark.parametrize(("rate", "at_once"), [(1e3, 8 << 10), (1e6, 50_000), (1e12, 256 << 10)])
def test_parts_are_small_where_the_rate_is_low(rate: float, at_once: int) -> None:
    assert Pace(lambda: rate).at_once() == at_once


def test_a_change_of_rate_is_felt_by_those_who_wait() -> None:
    async def run() -> float:
        rate = [1e3]
        pace, start_s = Pace(lambda: rate[0]), time.monotonic()
        await pace.take(200)  # the next one waits a fifth of a second at this rate
        moving = [asyncio.create_task(move(pace, 100 * (8 << 10)))]
        await asyncio.sleep(0.01)
        rate[0] = 0.0
        await asyncio.gather(*moving)
        return time.monotonic() - start_s

    assert asyncio.run(run()) < 0.2 + SLACK_S, "800 kB at 1 kB/s would take minutes"
