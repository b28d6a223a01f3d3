"""Tokens in another order than that in which they lie: what a shuffled corpus looks like that is not copied.

Words: a *store* holds tokens at *offsets*. A `Gathered` is a list of *segments*, each a stretch of the store; seen one
after the other, behind one separator, they are an array that is read by slices. It takes 16 bytes a segment.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from atoll.data.corpus import Indices
from atoll.data.tokenizer import Tokens


class Store(Protocol):
    """Tokens at offsets from 0."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def read(self, offset: int, out: Tokens) -> None:
        """Fill `out` with the tokens from `offset` on. May block for a disk or a network. Raises AtollError."""
        ...


class Gathered:
    """A separator, then all segments. Reads like an array by one slice, or by an array of offsets."""

    def __init__(self, store: Store, separator_id: int, at: Indices, lengths: Indices) -> None:
        """Segment `k` is `lengths[k]` tokens of the store, from `at[k]` on; none is empty."""
        self._store, self._separator_id, self._at = store, separator_id, at
        self._begins = np.concatenate([[1], 1 + np.cumsum(lengths)])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._store.dtype

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getitem__(self, where: slice | Indices) -> Tokens:
        if isinstance(where, slice):
            start, stop, step = where.indices(len(self))
            if step != 1:
                raise IndexError("only whole stretches are read")
            return self._read(start, max(start, stop))
        rows = np.asarray(where)
        return np.stack([self._read(int(row[0]), int(row[-1]) + 1) for row in rows])

    def offsets_of(self, places: Indices) -> Indices:
        """Where in the store the tokens at these places (from 1) lie."""
        segment = np.searchsorted(self._begins, places, side="right") - 1
        return self._at[segment] + (places - self._begins[segment])

    def reordered(self, starts: Indices, lengths: Indices) -> Gathered:
        """The stretches that begin at `starts`, in that order; each lies within one segment."""
        return Gathered(self._store, self._separator_id, self.offsets_of(starts), lengths)

    def _read(self, start: int, stop: int) -> Tokens:
        out = np.empty(stop - start, dtype=self.dtype)
        done = 0
        if start == 0 and stop > 0:
            out[0] = self._separator_id
            done = 1
        segment = int(np.searchsorted(self._begins, start + done, side="right")) - 1
        while start + done < stop:
            into = start + done - int(self._begins[segment])
            count = min(stop - start - done, int(self._begins[segment + 1]) - start - done)
            self._store.read(int(self._at[segment]) + into, out[done : done + count])
            done += count
            segment += 1
        return out
