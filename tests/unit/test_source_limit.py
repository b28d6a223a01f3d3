"""How many connections that prove nothing one source may open."""

from __future__ import annotations

import random

import pytest

from atoll.membership.source_limit import BURST, MOST_SOURCES, PER_S, SourceLimit, source_of


def test_one_source_has_its_burst_and_then_its_rate() -> None:
    limit = SourceLimit()
    at_once = sum(limit.take("192.0.2.1", 0.0) for _ in range(1000))
    assert at_once == BURST
    later = sum(limit.take("192.0.2.1", 10 * step / 5000) for step in range(5000))  # 500 a second for 10 s
    assert later == pytest.approx(10 * PER_S, abs=1)


def test_others_are_not_touched() -> None:
    limit = SourceLimit()
    while limit.take("192.0.2.1", 0.0):
        pass
    assert limit.take("192.0.2.2", 0.0)


def test_who_proves_itself_gives_its_place_back() -> None:
    limit = SourceLimit()
    for _ in range(1000):
        assert limit.take("192.0.2.1", 0.0)
        limit.give_back("192.0.2.1")


def test_memory_is_bounded_whatever_comes() -> None:
    limit, chance = SourceLimit(), random.Random(1)
    for _ in range(3 * MOST_SOURCES):
        limit.take(f"2001:db8:{chance.randrange(65536):x}:{chance.randrange(65536):x}::1", 0.0)
    assert len(limit._buckets) == MOST_SOURCES


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("", ""),
    ],
)
def test_sources(address: str, source: str) -> None:
    assert source_of(address) == source
