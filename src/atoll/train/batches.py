"""From leased slots to the tensors of a step: a peer reads what is leased to it, and asks for more if that is read.

What is read counts once a verdict says so. Then the leases are dealt anew, and the reader goes to where they begin; so
it does when work is lost. While a round is open a peer that runs dry asks for more slots. If none is left it reads what
it holds once more, in the next epoch; if it holds nothing, it takes no step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from atoll.data.reader import Reader
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
    ) -> None:
        """`own_data`: the data is this peer's alone, this is its digest, and rounds have nothing to say of it."""
        self.num_slots, self.own_data = 0 if own_data else slots.count, own_data
        self._count = slots.count
        self._reader = Reader(slots, seq_len)
        self._batch_size, self._batch_tokens = batch_size, batch_size * seq_len
        self._slot_tokens = slots.num_tokens / slots.count
        self._peer, self._leaser, self._emit = peer, leaser, emit
        self._nothing_left = False
        self._wished = 0

    def take(self) -> Batch | None:
        """The next batch; None if there is nothing to read before the next round."""
        reader = self._reader
        if reader.left < self._batch_tokens and not self._nothing_left:
            self._ask()
        while reader.left < self._batch_tokens:
            if not reader.num_held:
                return None
            reader.read_on()
        batch = reader.next_batch(self._batch_size)
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

    def settle(self) -> None:
        """A round has ended, and what was read in it is read for good."""
        self._leaser.read_for_good(self._peer, self._reads(), self._wished)
        self.begin()

    def begin(self) -> None:
        """From what is leased, at its positions. Work that was under way is lost."""
        self._nothing_left = False
        self._reader.hold(_held(self._leases()))

    def is_unbroken(self) -> bool:
        """Whether all that was read is still leased to this peer, and nobody has read in it since."""
        table = self._leaser.slots()
        return table is not None and not leases.broken(table, {self._peer: self._reads()})

    def _reads(self) -> Reads:
        return tuple(Read(*each) for each in self._reader.reads())

    def _leases(self) -> tuple[Lease, ...]:
        table = self._leaser.slots()
        return table.held(self._peer) if table is not None else ()

    def _ask(self) -> None:
        before = self._reader.num_held
        self._leaser.want_slots(self._batch_size + int(self._batch_tokens / self._slot_tokens) + 1)
        self._reader.hold_more(_held(self._leases()))
        self._nothing_left = self._reader.left < self._batch_tokens
        if self._nothing_left:
            self._emit(DataRanDry(slots=self._reader.num_held, before=before))


def _held(held: tuple[Lease, ...]) -> list[tuple[int, int, int]]:
    return [(lease.slot, lease.epoch, lease.at) for lease in held]
