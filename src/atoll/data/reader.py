"""A peer's reader: from the slots it holds to batches, without losing or repeating a token within an epoch.

Words: a slot's *position* is the number of its tokens that were handed out as targets, over all epochs;
divided by the slot's length it gives the epoch. The *open* slots are the first unread ones of the epoch's
order, as many as a batch has rows: each row reads on in its own slot, so the rows of a batch come from
different documents. A row that reaches the end of its slot goes on with the next one.

What is read next is a function of the positions alone. So a reader can be set to any positions at once, and
it then hands out the same batches, to the bit, as the reader that wrote those positions down.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from atoll.data.corpus import Documents
from atoll.data.slots import Slots
from atoll.errors import DataError

Positions = tuple[tuple[int, int], ...]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Token ids, int64 [rows, seq_len]: `targets[i, t]` is the token after `inputs[i, t]` in the corpus."""

    inputs: Ids
    targets: Ids

    @property
    def tokens(self) -> int:
        """How many tokens are predicted."""
        return self.targets.size


class Reader:
    """Reads the `held` slots, epoch after epoch. Owned by one thread; does no I/O."""

    def __init__(
        self, slots: Slots, held: Iterable[int], seq_len: int, *, max_epochs: int | None = None
    ) -> None:
        """`max_epochs`: the reader is exhausted after so many; None: never, unless it holds nothing."""
        self._slots = slots
        self._starts: list[int] = slots.starts.tolist()
        self._seq_len = seq_len
        self._max_epochs = max_epochs
        self._position = dict.fromkeys(sorted(held), 0)
        self.tokens_per_epoch = sum(map(self._length, self._position))
        self.seek(())

    @property
    def epoch(self) -> int:
        """The epoch (from 0) that the next batch begins in."""
        return self._epoch

    @property
    def exhausted(self) -> bool:
        """Nothing is left to read: the peer contributes no tokens, which is not the same as a zero update."""
        return not self._unread

    def positions(self) -> Positions:
        """(slot, position) of every held slot that was read, sorted: as of the last batch handed out."""
        return tuple((slot, position) for slot, position in self._position.items() if position)

    def seek(self, positions: Iterable[tuple[int, int]]) -> None:
        """Go to `positions` (slots not named: to their start). Slots that this reader does not hold are
        passed over.

        Reads no data: the cost is the number of slots, not the distance.
        """
        target = dict.fromkeys(self._position, 0)
        target.update((slot, position) for slot, position in positions if slot in target)
        if any(position < 0 for position in target.values()):
            raise ValueError(f"positions must not be negative: {sorted(target.items())}")
        self._position = target
        self._find_unread()

    def next_batch(self, batch_size: int) -> Batch:
        """The next `batch_size` rows. The last batches before exhaustion have fewer rows, or one shorter row.

        Raises DataError if the reader is exhausted.
        """
        rows, columns = self._shape(batch_size)
        batch = Batch(np.empty((rows, columns), np.int64), np.empty((rows, columns), np.int64))
        open_slots = self._unread[:batch_size]
        for row in range(rows):
            filled = 0
            while filled < columns:
                slot = open_slots[row % len(open_slots)]
                start, count = self._take(slot, columns - filled)
                span = slice(filled, filled + count)
                batch.inputs[row, span] = self._slots.tokens[start - 1 : start + count - 1]
                batch.targets[row, span] = self._slots.tokens[start : start + count]
                filled += count
                if self._left(slot) == 0:
                    self._close(slot, open_slots, batch_size)
        return batch

    def _shape(self, batch_size: int) -> tuple[int, int]:
        if self.exhausted:
            raise DataError(
                f"no data is left: this peer holds {len(self._position)} slots "
                f"with {self.tokens_per_epoch} tokens, and read them {self._epoch} times"
            )
        if self._max_epochs is None:
            return batch_size, self._seq_len
        ends = ((self._max_epochs * self._length(slot), at) for slot, at in self._position.items())
        left = sum(max(end - at, 0) for end, at in ends)
        return (min(batch_size, left // self._seq_len), self._seq_len) if left >= self._seq_len else (1, left)

    def _take(self, slot: int, wanted: int) -> tuple[int, int]:
        """Move on in `slot` by at most `wanted` tokens, not beyond its end: (first token's offset, count)."""
        count = min(wanted, self._left(slot))
        start = self._starts[slot] + self._position[slot] % self._length(slot)
        self._position[slot] += count
        return start, count

    def _close(self, slot: int, open_slots: list[int], batch_size: int) -> None:
        """`slot` is read: the epoch's next slot takes its place among the open ones; after the last, a new
        epoch.

        Always, `open_slots` are the first of `_unread` in some order; a new batch puts them in the epoch's
        order.
        """
        self._unread.remove(slot)
        if not self._unread:
            self._find_unread()
            open_slots[:] = self._unread[:batch_size]
        elif len(self._unread) >= len(open_slots):
            open_slots[open_slots.index(slot)] = self._unread[len(open_slots) - 1]
        else:
            open_slots.remove(slot)

    def _find_unread(self) -> None:
        """From the positions alone: the epoch, and the held slots that it has not read, in its order."""
        position = self._position
        self._epoch = min((at // self._length(slot) for slot, at in position.items()), default=0)
        if self._max_epochs is not None and self._epoch >= self._max_epochs:
            self._unread: list[int] = []
            return
        self._unread = [s for s in self._slots.order(self._epoch) if s in position and self._left(s) > 0]

    def _left(self, slot: int) -> int:
        return (self._epoch + 1) * self._length(slot) - self._position[slot]

    def _length(self, slot: int) -> int:
        return self._starts[slot + 1] - self._starts[slot]


def held_out_sequences(corpus: Documents, seq_len: int, count: int) -> Batch:
    """At most `count` rows, evenly spread over a held-out corpus: the same on all peers, whatever the seed.

    A corpus shorter than `seq_len` gives one shorter row.
    """
    columns = min(seq_len, corpus.num_tokens)
    available = corpus.num_tokens // columns
    count = min(count, available)
    starts = np.arange(count, dtype=np.int64) * available // count * columns
    offsets = starts[:, None] + np.arange(columns + 1, dtype=np.int64)
    rows = corpus.tokens[offsets].astype(np.int64)
    return Batch(np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:]))
