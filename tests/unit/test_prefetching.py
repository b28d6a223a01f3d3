"""Reading ahead: what comes next is read while a step runs, else it is dropped; errors come with the take."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from atoll.data.corpus import Corpus, TokenArray
from atoll.data.prefetching import Prefetcher
from atoll.data.reader import Batch, Stretches
from atoll.data.slots import Slots
from atoll.errors import DataError
from atoll.membership import leases
from atoll.train.batches import Batches
from atoll.train.leases_here import LeasesHere

SEQ_LEN, ROWS = 4, 2
WITHIN_S = 20.0


class Slow:
    """A text behind a gate: each read waits to be let through, and is counted. It may also fail."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens
        self.reads: list[tuple[int, str]] = []
        self.fails_from: int | None = None
        self._open = threading.Semaphore(0)
        self._heard = threading.Condition()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, where: slice) -> TokenArray:
        with self._heard:
            self.reads.append((where.start, threading.current_thread().name))
            self._heard.notify_all()
            # Settled as the read begins, which is what `wait_for` counts.
            fails = self.fails_from is not None and where.start >= self.fails_from
        assert self._open.acquire(timeout=WITHIN_S)
        if fails:
            raise DataError("the source is gone")
        return self.tokens[where]

    def let(self, reads: int) -> None:
        self._open.release(reads)

    def wait_for(self, reads: int) -> None:
        with self._heard:
            assert self._heard.wait_for(lambda: len(self.reads) >= reads, WITHIN_S), self.reads


class Alone:
    """One peer, 40 documents of 16 tokens, each a slot; a batch is half a document for each of two rows."""

    def __init__(self, prefetch: int) -> None:
        starts = np.arange(1, 40 * 16 + 2, 16)
        corpus = Corpus(tokens=np.arange(starts[-1], dtype=np.uint32), starts=starts)
        cut = Slots.cut(corpus, 40, seed=3)
        self.source, self._starts = Slow(cut.tokens), cut.starts
        slots = Slots(self.source, cut.starts, cut.seed)  # type: ignore[arg-type]
        self.here = LeasesHere(slots.count, seed=3)
        self.batches = Batches(slots, SEQ_LEN, ROWS, peer="a", leaser=self.here.of("a"), prefetch=prefetch)

    def slot_of(self, token: int) -> int:
        (place,) = np.flatnonzero(self.source.tokens == token)
        return int(np.searchsorted(self._starts, place, side="right")) - 1

    def begin(self, steps: int) -> None:
        self.here.begin({"a": self.batches.wish(steps)})
        self.batches.begin()

    def take(self) -> list[int]:
        batch = self.batches.take()
        assert batch is not None
        return batch.targets.ravel().tolist()


READS_A_BATCH = 2 * ROWS  # inputs and targets of a stretch in each row


@pytest.fixture
def ahead() -> Iterator[Alone]:
    alone = Alone(prefetch=2)
    yield alone
    alone.source.let(10_000)
    alone.batches.close()
    assert not [each for each in threading.enumerate() if each.name == "atoll-prefetch"]


def test_batches_are_read_while_steps_run_and_no_further_than_asked(ahead: Alone) -> None:
    source = ahead.source
    ahead.begin(10)
    source.wait_for(1)  # before anything was taken
    source.let(3 * READS_A_BATCH)
    first = ahead.take()
    # The step runs: nobody asks for anything, and two more batches are read.
    source.wait_for(3 * READS_A_BATCH)
    second, third = ahead.take(), ahead.take()
    assert {name for _, name in source.reads} == {"atoll-prefetch"}
    source.let(10_000)
    plain = Alone(prefetch=0)
    plain.source.let(10_000)
    plain.begin(10)
    assert [plain.take() for _ in range(3)] == [first, second, third]
    assert plain.source.reads[0][1] == threading.current_thread().name
    assert plain.batches.reads() == ahead.batches.reads(), "positions are those of what was taken"
    source.wait_for(5 * READS_A_BATCH)
    assert len(source.reads) == 5 * READS_A_BATCH


def test_lost_work_is_read_again_to_the_token(ahead: Alone) -> None:
    ahead.source.let(10_000)
    ahead.begin(10)
    lost = [ahead.take() for _ in range(3)]
    ahead.batches.begin()
    assert ahead.batches.reads() == ()
    assert [ahead.take() for _ in range(3)] == lost


def test_what_was_read_ahead_is_dropped_where_other_slots_are_held(ahead: Alone) -> None:
    ahead.source.let(10_000)
    ahead.begin(2)
    taken = [*ahead.take(), *ahead.take()]
    ahead.source.wait_for(4 * READS_A_BATCH)  # two more than were taken
    others = leases.give_back(ahead.here.slots(), ["a"])
    ahead.here.restore(leases.top_up(others, {"b": 8}))
    ahead.here.restore(leases.top_up(ahead.here.slots(), {"a": 8}))
    held = {lease.slot for lease in ahead.here.slots().held("a")}
    ahead.batches.begin()
    new = [ahead.take() for _ in range(4)]
    assert {ahead.slot_of(token) for batch in new for token in batch} <= held
    assert not set(taken) & {token for batch in new for token in batch}


def test_an_error_comes_with_the_batch_it_belongs_to_and_not_before(ahead: Alone) -> None:
    source = ahead.source
    source.let(10_000)
    ahead.begin(10)
    ahead.take()
    source.wait_for(3 * READS_A_BATCH)
    source.fails_from = 0
    ahead.take()
    ahead.take()
    with pytest.raises(DataError, match="the source is gone"):
        ahead.take()


def test_an_error_of_what_never_comes_is_nobodys() -> None:
    def read(stretches: Stretches) -> Batch:
        if stretches == ((0, 0, 13, 1),):
            raise DataError("unlucky")
        return Batch(np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64))

    prefetcher = Prefetcher(read)
    prefetcher.expect([((0, 0, 13, 1),), ((0, 0, 14, 1),)])
    prefetcher.expect([((0, 0, 14, 1),)])
    assert prefetcher.take(((0, 0, 14, 1),)).tokens == 1
    with pytest.raises(DataError, match="unlucky"):
        prefetcher.take(((0, 0, 13, 1),))
    prefetcher.close()


def test_a_panic_of_native_code_is_no_wait_for_ever() -> None:
    class Panic(BaseException):
        """As those of Rust's code come: no Exception."""

    def read(stretches: Stretches) -> Batch:
        raise Panic("an index out of bounds")

    prefetcher = Prefetcher(read)
    try:
        prefetcher.expect([((0, 0, 13, 1),)])
        got: list[BaseException] = []

        def take() -> None:
            try:
                prefetcher.take(((0, 0, 13, 1),))
            except BaseException as error:
                got.append(error)

        taker = threading.Thread(target=take, daemon=True)
        taker.start()
        taker.join(WITHIN_S)
        assert [type(each) for each in got] == [Panic]
    finally:
        prefetcher.close()
