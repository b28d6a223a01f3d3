"""What a node of the DHT keeps: only what is valid, the newest of it, for a while, and never too much."""

from __future__ import annotations

import pytest

from atoll.clock import ManualClock
from atoll.network.authority import Authority
from atoll.network.dht_record import MAX_BYTES, key_of, sign
from atoll.network.dht_store import RecordStore

AUTHORITY, OTHER = Authority.new("run"), Authority.new("run")
KEY = key_of("run", AUTHORITY.fingerprint)


def record(
    term: int, sequence: int = 0, *, port: int = 7070, run: str = "run", authority: Authority = AUTHORITY
) -> bytes:
    return sign(authority, run=run, addresses=[f"10.0.0.5:{port}"], term=term, sequence=sequence)


def test_the_newest_is_held() -> None:
    store = RecordStore(ManualClock())
    assert store.offer(KEY, record(2))
    assert not store.offer(KEY, record(1, sequence=9))
    assert store.ignored == {"older than one that is known": 1}
    assert store.offer(KEY, record(2, sequence=1))
    assert store.offer(KEY, record(3))
    newest = store.newest(KEY)
    assert newest is not None
    assert newest.age == (3, 0)


def test_of_two_of_the_same_age_all_nodes_hold_the_same() -> None:
    both = [record(1, port=1), record(1, port=2)]
    for order in (both, both[::-1]):
        store = RecordStore(ManualClock())
        for each in order:
            store.offer(KEY, each)
        assert store.get(KEY) == max(both)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (record(9, authority=OTHER), "of another run or authority"),
        (record(9, run="walk"), "of another run or authority"),
        (record(9)[:-64] + bytes(64), "wrongly signed"),
        (bytes(MAX_BYTES + 1), "too long"),
        (b"hello", "no record"),
    ],
)
def test_what_is_not_this_runs_is_ignored(data: bytes, why: str) -> None:
    store = RecordStore(ManualClock())
    assert store.offer(KEY, record(1))
    assert not store.offer(KEY, data, "10.0.0.66")
    assert store.ignored == {why: 1}
    assert store.get(KEY) == record(1)


def test_it_is_held_for_as_long_as_somebody_publishes_it() -> None:
    clock = ManualClock()
    store = RecordStore(clock, expiry_s=10.0)
    store.offer(KEY, record(1))
    clock.advance(9.0)
    store.offer(KEY, record(1))
    clock.advance(9.0)
    assert store.get(KEY) == record(1)
    clock.advance(1.1)
    assert store.get(KEY) is None
    assert store.newest(KEY) is None
    store.offer(key_of("walk", AUTHORITY.fingerprint), record(1, run="walk"))
    assert len(store) == 1  # the expired one takes no room


def test_strangers_can_fill_it_and_no_more() -> None:
    store = RecordStore(ManualClock(), most=8, most_per_source=3)
    store.keep_place_for(KEY)
    for index in range(30):
        run = f"junk-{index}"
        store.offer(
            key_of(run, OTHER.fingerprint), record(1, run=run, authority=OTHER), f"10.0.0.{index // 5}"
        )
    assert len(store) == 8
    assert store.size_bytes <= 8 * MAX_BYTES
    assert store.ignored["too many of one source"] > 0
    assert store.ignored["the store is full"] > 0
    assert sum(store.ignored.values()) == 22
    assert store.offer(KEY, record(1), "10.0.0.0"), "this node's own run has its place"
