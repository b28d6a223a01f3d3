"""Between a GPU and host memory: two pinned buffers of one block each, and a stream beside the one that computes.

While one block is converted on the host the next one is on its way. Belongs to the training thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import torch
from torch import Tensor

from atoll.state.own_rows import BLOCK

_WIDEST_BYTES: Final = 8  # of one element: fp64


class Staging:
    """For one CUDA device. Takes 2 x `BLOCK` x 8 bytes of pinned memory, once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        size = BLOCK * _WIDEST_BYTES
        pinned = device.type == "cuda"
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]

    def to_host(self, source: Iterable[Tensor]) -> Iterator[Tensor]:
        """Each block on the host, in its own dtype. What is given is overwritten two blocks later."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        waiting: tuple[Tensor, torch.cuda.Event] | None = None
        for number, block in enumerate(source):
            there, copied = self._buffer(number, block), self._copied[number % 2]
            with torch.cuda.stream(self._stream):
                there.copy_(block, non_blocking=True)
                copied.record(self._stream)
            if waiting is not None:
                waiting[1].synchronize()
                yield waiting[0]
            waiting = there, copied
        if waiting is not None:
            waiting[1].synchronize()
            yield waiting[0]

    def to_device(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Set each block (first of a pair) to what the host has (second), converted there. What is computed on the
        current stream afterwards sees it."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        for number, (block, values) in enumerate(pairs):
            there, copied = self._buffer(number, block), self._copied[number % 2]
            copied.synchronize()  # the block before the last has left the buffer
            there.copy_(values)
            with torch.cuda.stream(self._stream):
                block.copy_(there, non_blocking=True)
                copied.record(self._stream)
        current.wait_stream(self._stream)

    def _buffer(self, number: int, like: Tensor) -> Tensor:
        data = self._buffers[number % 2][: like.numel() * like.element_size()]
        return data.view(like.dtype).view(like.shape)
