"""Slots and readers: no token lost or repeated with any number of peers; one order by seed; exact seeks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.data.corpus import Corpus, tokenize
from atoll.data.reader import Batch, Reader, held_out_sequences
from atoll.shuffle import shuffled
from atoll.data.slots import Slots, static_assignment
from atoll.data.tokenizer import ByteTokenizer
from atoll.errors import DataError

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)
counts = st.integers(1, 12)
seeds = st.integers(0, 2**63 - 1)


def numbered(lengths: Sequence[int]) -> Corpus:
    """Documents of the given lengths (plus separator) in which every token is another number."""
    starts = np.cumsum([1, *(length + 1 for length in lengths)])
    return Corpus(tokens=np.arange(starts[-1], dtype=np.uint32), starts=starts)


def readers(slots: Slots, num_peers: int, seq_len: int, max_epochs: int | None = None) -> list[Reader]:
    num_peers = min(num_peers, slots.count)
    return [
        Reader(slots, static_assignment(slots, i, num_peers), seq_len, max_epochs=max_epochs)
        for i in range(num_peers)
    ]


def drain(reader: Reader, batch_size: int) -> list[Batch]:
    batches = []
    while not reader.exhausted:
        batches.append(reader.next_batch(batch_size))
    return batches


def same(a: Batch, b: Batch) -> bool:
    return np.array_equal(a.inputs, b.inputs) and np.array_equal(a.targets, b.targets)


@settings(deadline=None)
@given(lengths, counts, counts, counts, counts, st.integers(1, 3), seeds)
def test_every_token_is_a_target_once_an_epoch(
    lengths: list[int], num_slots: int, peers: int, seq_len: int, batch_size: int, epochs: int, seed: int
) -> None:
    slots = Slots.cut(numbered(lengths), num_slots, seed)
    before = dict(zip(slots.tokens[1:].tolist(), slots.tokens[:-1].tolist(), strict=True))
    read: Counter[int] = Counter()
    for reader in readers(slots, peers, seq_len, epochs):
        for batch in drain(reader, batch_size):
            targets = batch.targets.ravel().tolist()
            assert batch.inputs.ravel().tolist() == [before[token] for token in targets]
            assert batch.tokens == len(targets)
            read.update(targets)
    assert read == Counter(dict.fromkeys(before, epochs))


@settings(deadline=None)
@given(lengths, counts, counts, counts, seeds)
def test_an_endless_reader_reads_evenly(
    lengths: list[int], num_slots: int, seq_len: int, batch_size: int, seed: int
) -> None:
    slots = Slots.cut(numbered(lengths), num_slots, seed)
    (reader,) = readers(slots, 1, seq_len)
    read = Counter(dict.fromkeys(slots.tokens[1:].tolist(), 0))
    for _ in range(20):
        batch = reader.next_batch(batch_size)
        assert batch.inputs.shape == batch.targets.shape == (batch_size, seq_len)
        read.update(batch.targets.ravel().tolist())
        assert set(read.values()) <= {reader.epoch, reader.epoch + 1}
        half_read = [slot for slot, position in reader.positions() if position % np.diff(slots.starts)[slot]]
        assert len(half_read) <= batch_size


@settings(deadline=None)
@given(lengths, counts, counts, counts, counts, st.integers(0, 30), seeds)
def test_seek_gives_the_same_batches_to_the_bit(
    lengths: list[int], num_slots: int, peers: int, seq_len: int, batch_size: int, steps: int, seed: int
) -> None:
    slots = Slots.cut(numbered(lengths), num_slots, seed)
    running = readers(slots, peers, seq_len)
    for reader in running:
        for _ in range(steps):
            reader.next_batch(batch_size)
    everyone = [pair for reader in running for pair in reader.positions()]
    for reader, resumed in zip(running, readers(slots, peers, seq_len), strict=True):
        here = reader.positions()
        resumed.seek(everyone)
        assert resumed.positions() == here
        ahead = [reader.next_batch(batch_size) for _ in range(10)]
        assert all(same(batch, resumed.next_batch(batch_size)) for batch in ahead)
        reader.seek(here)
        assert all(same(batch, reader.next_batch(batch_size)) for batch in ahead)


def test_seek_to_nothing_is_the_start_and_negative_positions_are_refused() -> None:
    (reader,) = readers(Slots.cut(numbered([5] * 20), 4, seed=1), 1, 8)
    first = reader.next_batch(2)
    reader.seek(())
    assert same(first, reader.next_batch(2))
    with pytest.raises(ValueError, match="must not be negative"):
        reader.seek([(0, -1)])


def test_positions_count_only_what_was_handed_out() -> None:
    (reader,) = readers(Slots.cut(numbered([9] * 6), 6, seed=1), 1, 4)
    assert reader.positions() == ()
    for step in range(1, 40):
        reader.next_batch(2)
        assert sum(at for _, at in reader.positions()) == step * 8


@settings(deadline=None)
@given(lengths, counts, seeds)
def test_slots_hold_whole_documents_and_none_is_empty(lengths: list[int], num_slots: int, seed: int) -> None:
    corpus = numbered(lengths)
    slots = Slots.cut(corpus, num_slots, seed)
    assert slots.count == min(num_slots, len(lengths))
    assert slots.num_tokens == corpus.num_tokens
    assert all(a < b for a, b in pairwise(slots.starts))
    ends = set((corpus.starts[1:] - 1).tolist())
    assert all(int(slots.tokens[start - 1]) in ends for start in slots.starts[1:])


@settings(deadline=None)
@given(lengths, counts, seeds, st.integers(1, 20))
def test_long_documents_are_shuffled_in_pieces_and_no_token_is_lost(
    lengths: list[int], num_slots: int, seed: int, piece_tokens: int
) -> None:
    corpus = numbered(lengths)
    pieces = corpus.in_pieces(piece_tokens)
    assert np.diff(pieces.starts).max() <= piece_tokens
    assert set(corpus.starts.tolist()) <= set(pieces.starts.tolist())
    slots = Slots.cut(corpus, num_slots, seed, piece_tokens=piece_tokens)
    assert sorted(slots.tokens.tolist()) == sorted(corpus.tokens.tolist())
    assert slots.count == min(num_slots, pieces.num_documents)


def test_slots_are_balanced() -> None:
    slots = Slots.cut(numbered([9] * 1000), 64, seed=3)
    assert np.ptp(np.diff(slots.starts)) <= 10
    skewed = Slots.cut(numbered([1] * 99 + [100_000]), 50, seed=3)
    assert skewed.count == 50


def test_order_depends_on_the_seed_and_the_epoch_alone() -> None:
    corpus = numbered([5] * 100)
    one, again, other = (Slots.cut(corpus, 16, seed) for seed in (1, 1, 2))
    assert np.array_equal(one.tokens, again.tokens)
    assert one.order(3) == again.order(3)
    assert not np.array_equal(one.tokens, other.tokens)
    orders = {tuple(one.order(epoch)) for epoch in range(10)} | {tuple(other.order(0))}
    assert len(orders) == 11
    assert all(sorted(order) == list(range(16)) for order in orders)


def test_the_shuffle_is_splitmix64() -> None:
    def step(state: int) -> int:
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    assert step(gamma) == 0xE220A8397B1DCDAF  # the first output of the published generator for seed 0
    start = step((step((2**63 - 1 + gamma) % 2**64) + gamma + 7) % 2**64)
    keys = [step((start + i * gamma) % 2**64) for i in range(1, 101)]
    assert shuffled(100, 2**63 - 1, 7).tolist() == sorted(range(100), key=keys.__getitem__)
    assert shuffled(0, 1).tolist() == []


def test_rows_of_a_batch_come_from_different_slots() -> None:
    slots = Slots.cut(numbered([500] * 64), 64, seed=5)
    (reader,) = readers(slots, 1, 16)
    for _ in range(10):
        batch = reader.next_batch(8)
        first = [int(np.flatnonzero(slots.tokens == token)[0]) for token in batch.targets[:, 0]]
        assert len(set(np.searchsorted(slots.starts, first, side="right").tolist())) == 8


def test_three_documents_for_two_peers() -> None:
    corpus = tokenize(["one", "x", "a third document"], ByteTokenizer())
    train, held_out = corpus.split(0.05)
    slots = Slots.cut(train, 64, seed=0)
    assert (slots.count, held_out.num_documents) == (2, 1)
    for reader in readers(slots, 2, 32):
        batch = reader.next_batch(4)
        assert (batch.tokens, batch.inputs.dtype) == (128, np.int64)
    with pytest.raises(DataError, match=r"3 peers cannot share 2 data slots.*at most 2 peers"):
        static_assignment(slots, 0, 3)


def test_peers_of_a_run_share_all_slots_and_none_twice() -> None:
    slots = Slots.cut(numbered([3] * 50), 10, seed=0)
    for num_peers in range(1, 11):
        held = [slot for i in range(num_peers) for slot in static_assignment(slots, i, num_peers)]
        assert sorted(held) == list(range(10))


def test_a_peer_without_slots_is_exhausted_not_zero() -> None:
    reader = Reader(Slots.cut(numbered([3] * 4), 2, seed=0), (), 8)
    assert reader.exhausted
    assert reader.positions() == ()
    with pytest.raises(DataError, match="no data is left: this peer holds 0 slots with 0 tokens"):
        reader.next_batch(2)


def test_held_out_sequences_are_spread_over_the_corpus() -> None:
    corpus = numbered([99] * 10)
    batch = held_out_sequences(corpus, 10, 4)
    assert batch.targets[:, 0].tolist() == [1, 251, 501, 751]
    assert np.array_equal(batch.inputs + 1, batch.targets)
    assert held_out_sequences(corpus, 10, 1000).targets.ravel().tolist() == list(range(1, 1001))
    assert held_out_sequences(numbered([3]), 10, 4).targets.tolist() == [[1, 2, 3, 4]]
