"""From a reader's arrays to the tensors of a step, with the positions that a round commits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from atoll.data.reader import Positions, Reader


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids, int64 [sequences, seq_len]; `positions` are the data cursors after this batch."""

    inputs: torch.Tensor
    targets: torch.Tensor
    positions: Positions


class Batches(Iterator[Batch]):
    """Endless batches of one reader. Owned by the training thread."""

    def __init__(self, reader: Reader, batch_size: int) -> None:
        self._reader, self._batch_size = reader, batch_size

    def __next__(self) -> Batch:
        batch = self._reader.next_batch(self._batch_size)
        return Batch(
            torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets), self._reader.positions()
        )
