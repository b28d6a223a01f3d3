"""From leased slots to the tensors of a step: a peer reads what is leased to it, and asks for more if that is read.

What is read counts once a verdict says so. Then the leases are dealt anew, and the reader goes to where they begin; so
it does when work is lost. While a round is open a peer that runs dry asks for more slots. If none is left it reads what
it holds once more, in the next epoch; if it holds nothing, it takes no step.

The next few batches are read ahead (`data.prefetching`). What counts as read is what was taken: the reader here moves
with the steps, and a copy of it looks ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from atoll.data.prefetching import Prefetcher
from atoll.data.reader import Batch as Rows
from atoll.data.reader import Reader, Stretches, read
from atoll.data.slots import Slots
from atoll.events import DataRanDry, Event
from atoll.membership import leases
from atoll.membership.leases import Lease, Read, Reads, SlotTable

_SPARE = 1.25
"""Slots differ in length: so much more than the tokens of a round is held."""


class Leaser(Protocol):
    """Who leases slots: the session, for the coordinator; or a table here (`train.leases_here`)."""

    def slots(self) -> SlotTable | None: ...
    def want_slots(self, more: int) -> bool: ...
    def read_for_good(self, peer: str, reads: Reads, wish: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids, int64 [sequences, seq_len]."""

    inputs: torch.Tensor
    targets: torch.Tensor


class Batches:
    """One peer's batches. Owned by the training thread. It is the `data` of its rounds (`diloco.data.Data`)."""

    def __init__(
        self,
        slots: Slots,
        seq_len: int,
        batch_size: int,
        *,
        peer: str,
        leaser: Leaser,
        emit: Callable[[Event], None] = lambda event: None,
        own_data: str = "",
        prefetch: int = 0,
    ) -> None:
        """`own_data`: the data is this peer's alone, this is its digest, and rounds have nothing to say of it.
        `prefetch`: so many batches are read ahead, by a thread that `close` ends; 0: each as it is taken."""
        self.num_slots, self.own_data = 0 if own_data else slots.count, own_data
        self._count = slots.count
        self._slots, self._seq_len = slots, seq_len
        self._reader = Reader(slots, seq_len)
        self._ahead: Reader | None = None  # where the next batch to be read ahead begins; None: at the reader
        self._coming: deque[Stretches] = deque()
        self._prefetch = prefetch
        self._prefetcher = Prefetcher(self._read) if prefetch else None
        self._batch_size, self._batch_tokens = batch_size, batch_size * seq_len
        self._slot_tokens = slots.num_tokens / slots.count
        self._peer, self._leaser, self._emit = peer, leaser, emit
        self._nothing_left = False
        self._wished = 0

    def take(self) -> Batch | None:
        """The next batch; None if there is nothing to read before the next round. Raises what reading it raised."""
        reader = self._reader
        if reader.left < self._batch_tokens and not self._nothing_left:
            self._ask()
        while reader.left < self._batch_tokens:
            if not reader.num_held:
                return None
            reader.read_on()
            self._turn()
        stretches = reader.move_on(self._batch_size)
        if self._prefetcher is None:
            batch = self._read(stretches)
        else:
            batch = self._prefetcher.take(stretches)
            if self._coming:  # its first was this one
                self._coming.popleft()
            self._look_ahead()
        return Batch(torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets))

    def wish(self, steps: int) -> int:
        """How many slots a round of so many steps needs: those that are open, and those that come after them."""
        spare = _SPARE * steps * self._batch_tokens / self._slot_tokens
        self._wished = min(self._count, self._batch_size + int(spare) + 1)
        return self._wished

    def reads(self) -> Reads:
        """What was read since the leases were dealt: as of the last batch, which is that of the last step."""
        return self._reads() if self.num_slots else ()

    def go_on(self) -> None:
        """A round was skipped: what was read is part of the next one."""
        self._nothing_left = False
        self._reader.hold_more(_held(self._leases()))
        self._turn()
        self._look_ahead()

    def settle(self) -> None:
        """A round has ended, and what was read in it is read for good."""
        self._leaser.read_for_good(self._peer, self._reads(), self._wished)
        self.begin()

    def begin(self) -> None:
        """From what is leased, at its positions. Work that was under way is lost."""
        self._nothing_left = False
        self._reader.hold(_held(self._leases()))
        self._turn()
        self._look_ahead()

    def close(self) -> None:
        """Read nothing ahead any more. Idempotent."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def is_unbroken(self) -> bool:
        """Whether all that was read is still leased to this peer, and nobody has read in it since."""
        table = self._leaser.slots()
        return table is not None and not leases.broken(table, {self._peer: self._reads()})

    def _turn(self) -> None:
        """The reader stands elsewhere, or holds other slots: what comes next is found anew."""
        self._ahead = None
        self._coming.clear()

    def _look_ahead(self) -> None:
        if self._prefetcher is None:
            return
        ahead = self._ahead = self._ahead or self._reader.copy()
        while len(self._coming) < self._prefetch and ahead.left >= self._batch_tokens:
            self._coming.append(ahead.move_on(self._batch_size))
        self._prefetcher.expect(self._coming)

    def _read(self, stretches: Stretches) -> Rows:
        return read(self._slots, stretches, self._batch_size, self._seq_len)

    def _reads(self) -> Reads:
        return tuple(Read(*each) for each in self._reader.reads())

    def _leases(self) -> tuple[Lease, ...]:
        table = self._leaser.slots()
        return table.held(self._peer) if table is not None else ()

    def _ask(self) -> None:
        before = self._reader.num_held
        self._leaser.want_slots(self._batch_size + int(self._batch_tokens / self._slot_tokens) + 1)
        self._reader.hold_more(_held(self._leases()))
        self._turn()
        self._nothing_left = self._reader.left < self._batch_tokens
        if self._nothing_left:
            self._emit(DataRanDry(slots=self._reader.num_held, before=before))


def _held(held: tuple[Lease, ...]) -> list[tuple[int, int, int]]:
    return [(lease.slot, lease.epoch, lease.at) for lease in held]
