"""Batches for a peer of several ranks: rank 0 reads, all ranks get the same batch, and each trains its rows of it."""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from atoll.mesh.crew import Crew
from atoll.train.batches import Batch, Batches


class _Told(msgspec.Struct, frozen=True):
    """A batch as bytes (int32, rows after each other); no rows: nothing is left to read before the next round."""

    rows: int
    inputs: bytes = b""
    targets: bytes = b""


class RankBatches:
    """`take` is called by all ranks at the same line."""

    def __init__(self, crew: Crew, batches: Batches | None) -> None:
        """`batches` are rank 0's, None elsewhere."""
        self._crew, self._batches = crew, batches

    def take(self) -> Batch | None:
        """The next batch, the same on all ranks; None if there is nothing to read before the next round. Raises what
        reading raises, on all ranks."""
        told = self._crew.decide(_Told, self._read)
        if not told.rows:
            return None
        return Batch(_tensor(told.inputs, told.rows), _tensor(told.targets, told.rows))

    def _read(self) -> _Told:
        assert self._batches is not None
        batch = self._batches.take()
        if batch is None:
            return _Told(0)
        return _Told(len(batch.inputs), _bytes(batch.inputs), _bytes(batch.targets))


def _bytes(tokens: torch.Tensor) -> bytes:
    return tokens.numpy().astype("<i4").tobytes()


def _tensor(data: bytes, rows: int) -> torch.Tensor:
    tokens = np.frombuffer(data, dtype="<i4").astype(np.int64)
    return torch.from_numpy(tokens.reshape(rows, -1))
