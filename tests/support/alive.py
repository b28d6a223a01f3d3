"""How much memory tensors hold that were made while it watched: counted by their storages, not by the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """A context. Saved for the backward pass or not, what autograd keeps is alive; hooks on what is saved would not see
    what selective checkpointing keeps. `largest` is the largest single storage, both in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.largest = 0
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.bytes()  # forgets what is gone: an address may be used again
        for ref, _ in _storages((args, kwargs)):
            if ref.cdata not in self._seen:
                self._seen[ref.cdata] = ref, 0  # it was there before
        out = func(*args, **(kwargs or {}))
        for ref, size in _storages(out):
            if ref.cdata not in self._seen:
                self._seen[ref.cdata] = ref, size
                self.largest = max(self.largest, size)
        self.peak = max(self.peak, self.bytes())
        return out

    def bytes(self) -> int:
        self._seen = {key: seen for key, seen in self._seen.items() if not seen[0].expired()}
        return sum(size for _, size in self._seen.values())


def _storages(values: object) -> Iterator[tuple[StorageWeakRef, int]]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            storage = leaf.untyped_storage()
            yield StorageWeakRef(storage), storage.nbytes()
