"""A peer's reader: from the slots it holds to batches, without losing or repeating a token within an epoch.

Words: a slot's *position* is (epoch, tokens read in it); the end of an epoch is the start of the next. A slot is *held*
from a position on, to the end of that epoch. The *open* slots are the first unread ones, as many as a batch has rows:
each row reads on in its own slot, so the rows of a batch come from different documents. A row that reaches the end of
its slot goes on with the next one.

What is read next is a function of what is held, in its order, and of the positions. So a reader can be set to any
positions at once, and it then hands out the same batches, to the bit, as the reader that wrote those positions down.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from atoll.data.corpus import Documents
from atoll.data.slots import Slots
from atoll.errors import DataError

Position = tuple[int, int]
Held = tuple[int, int, int]
"""A slot, and the position (epoch, tokens) from which on it is held."""
Ids = npt.NDArray[np.int64]
Stretches = tuple[tuple[int, int, int, int], ...]
"""What a batch is made of: (row, column, offset of the first target in the text, tokens) of each stretch of a slot."""


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
    """Reads the slots it holds. Owned by one thread; only `next_batch` does I/O."""

    def __init__(self, slots: Slots, seq_len: int) -> None:
        self._slots = slots
        self._starts: list[int] = slots.starts.tolist()
        self._seq_len = seq_len
        # By slot, in tokens over all epochs: where it was taken over, where it is, and to where it may be read.
        self._begun: dict[int, int] = {}
        self._position: dict[int, int] = {}
        self._end: dict[int, int] = {}
        self._unread: list[int] = []
        # What was read in slots that were lost since: it has to be told all the same.
        self._lost: list[tuple[int, int, int]] = []

    @property
    def num_held(self) -> int:
        return len(self._position)

    @property
    def left(self) -> int:
        """Tokens that are left to read in what is held."""
        return sum(self._left(slot) for slot in self._unread)

    def hold(self, held: Iterable[Held]) -> None:
        """Hold these slots, each from its position on, and nothing else; what was read before does not count.

        Reads no data: the cost is the number of slots, not the distance.
        """
        self._begun, self._position, self._end = {}, {}, {}
        self.hold_more(held)
        self._lost = []

    def hold_more(self, held: Iterable[Held]) -> None:
        """Hold these slots and no others; where one was held before, reading goes on. What was read in one that is held
        no more, or from elsewhere, stays among the reads: the work that is done has it in it."""
        begun, position, end = self._begun, self._position, self._end
        self._begun, self._position, self._end = {}, {}, {}
        for slot, epoch, at in held:
            length = self._length(slot)
            if not 0 <= at < length or epoch < 0:
                raise DataError(
                    f"data slot {slot} has {length} tokens and no position {at} in epoch {epoch}: the run has read "
                    "another text; give it that one, or begin anew with --fresh"
                )
            here = epoch * length + at
            goes_on = begun.get(slot) == here
            self._begun[slot] = here
            self._position[slot] = position[slot] if goes_on else here
            self._end[slot] = end[slot] if goes_on else (epoch + 1) * length
        self._lost += [
            (slot, begun[slot], at)
            for slot, at in position.items()
            if at != begun[slot] and self._begun.get(slot) != begun[slot]
        ]
        self._find_unread()

    def read_on(self) -> None:
        """What is held is read: read it once more, in the next epoch. The slots that are furthest behind come first."""
        epochs = {slot: end // self._length(slot) for slot, end in self._end.items()}
        behind = min(epochs.values())
        for slot, epoch in epochs.items():
            if epoch == behind:
                self._end[slot] += self._length(slot)
        self._find_unread()

    def reads(self) -> tuple[tuple[int, Position, Position], ...]:
        """(slot, from, to) of every slot that was read in since it is held: as of the last batch handed out."""
        held = [(slot, self._begun[slot], position) for slot, position in self._position.items()]
        return tuple(
            (slot, self._split(slot, begun), self._split(slot, position))
            for slot, begun, position in (*self._lost, *held)
            if position != begun
        )

    def next_batch(self, batch_size: int) -> Batch:
        """The next `batch_size` rows. Raises DataError if fewer tokens are left."""
        return read(self._slots, self.move_on(batch_size), batch_size, self._seq_len)

    def move_on(self, batch_size: int) -> Stretches:
        """Count the next `batch_size` rows as read and say what `read` reads for them. Raises DataError if fewer tokens
        are left."""
        rows, columns = batch_size, self._seq_len
        if self.left < rows * columns:
            raise DataError(
                f"a batch needs {rows * columns} tokens, {self.left} are left in {self.num_held} data slots"
            )
        stretches: list[tuple[int, int, int, int]] = []
        open_slots = self._unread[:rows]
        for row in range(rows):
            filled = 0
            while filled < columns:
                slot = open_slots[row % len(open_slots)]
                start, count = self._take(slot, columns - filled)
                stretches.append((row, filled, start, count))
                filled += count
                if self._left(slot) == 0:
                    self._close(slot, open_slots)
        return tuple(stretches)

    def copy(self) -> Reader:
        """Another reader that stands where this one does: to look ahead. It goes its own way."""
        other = Reader.__new__(Reader)
        other._slots, other._starts, other._seq_len = self._slots, self._starts, self._seq_len
        other._begun, other._position, other._end = dict(self._begun), dict(self._position), dict(self._end)
        other._unread, other._lost = list(self._unread), list(self._lost)
        return other

    def _take(self, slot: int, wanted: int) -> tuple[int, int]:
        """Move on in `slot` by at most `wanted` tokens, not beyond its end: (first token's offset, count)."""
        length = self._length(slot)
        at = self._position[slot] % length
        count = min(wanted, self._left(slot), length - at)
        self._position[slot] += count
        return self._starts[slot] + at, count

    def _close(self, slot: int, open_slots: list[int]) -> None:
        """`slot` is read: the next unread one takes its place among the open ones.

        Always, `open_slots` are the first of `_unread` in some order; a new batch puts them in their order.
        """
        self._unread.remove(slot)
        if len(self._unread) >= len(open_slots):
            open_slots[open_slots.index(slot)] = self._unread[len(open_slots) - 1]
        else:
            open_slots.remove(slot)

    def _find_unread(self) -> None:
        self._unread = [slot for slot in self._position if self._left(slot) > 0]

    def _left(self, slot: int) -> int:
        return self._end[slot] - self._position[slot]

    def _length(self, slot: int) -> int:
        return self._starts[slot + 1] - self._starts[slot]

    def _split(self, slot: int, tokens: int) -> Position:
        return divmod(tokens, self._length(slot))


def read(slots: Slots, stretches: Stretches, batch_size: int, seq_len: int) -> Batch:
    """The batch of these stretches. A function of the text alone; may block for a disk or a network."""
    batch = Batch(np.empty((batch_size, seq_len), np.int64), np.empty((batch_size, seq_len), np.int64))
    for row, column, start, count in stretches:
        span = slice(column, column + count)
        batch.inputs[row, span] = slots.tokens[start - 1 : start + count - 1]
        batch.targets[row, span] = slots.tokens[start : start + count]
    return batch


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
