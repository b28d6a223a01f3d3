"""Bytes and tables between the ranks of a peer, over a gloo group of their own: tensors only, nothing is unpickled.

For the training thread. Each call is collective: all ranks make the same calls in the same order. A wait looks a few
times a second whether the watch knows of a lost sibling, for a frozen one keeps its connections.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from atoll.errors import SiblingLost
from atoll.mesh.group import RankGroup, abandon, first_line, gloo_options
from atoll.mesh.watch import Watch

BLOCK_BYTES = 1024
"""What a small message travels in: one collective instead of two."""
_LENGTH_BYTES = 8
MAX_BYTES = 1 << 28
SLICE_S = 0.2
GLOO_LATER_S = 5.0
"""gloo's own limit comes after ours, which has the better words."""

Table = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]


class Channel:
    """One gloo group over all ranks. `watch` knows of lost siblings; `wait_s` bounds each wait."""

    def __init__(self, group: RankGroup, watch: Watch, *, connect_s: float, wait_s: float) -> None:
        """Connects all ranks; blocks at most about `connect_s`. Raises SiblingLost."""
        assert group.store is not None
        self._rank, self._num_ranks = group.rank, group.num_ranks
        self._watch = watch
        self._broken = ""
        try:
            self._group: dist.ProcessGroupGloo | None = dist.ProcessGroupGloo(
                dist.PrefixStore("crew", group.store),
                group.rank,
                group.num_ranks,
                gloo_options(group.host, connect_s),  # type: ignore[bad-argument-type]
            )
        except RuntimeError as error:
            raise SiblingLost(
                f"rank {group.rank} cannot connect to its siblings: {first_line(error)}"
            ) from error
        self.set_wait(wait_s)

    def set_wait(self, wait_s: float) -> None:
        """Bound each wait from now on."""
        self._wait_s = wait_s
        if self._group is not None:
            self._group._set_default_timeout(timedelta(seconds=wait_s + GLOO_LATER_S))

    def tell(self, data: bytes | None, within_s: float | None = None) -> bytes:
        """Rank 0's `data`, on all ranks; the others pass None. `within_s` bounds this wait instead."""
        block = _block(data) if data is not None else torch.zeros(BLOCK_BYTES, dtype=torch.uint8)
        self._broadcast(block, within_s or self._wait_s)
        size = _size_of(block)
        if size <= BLOCK_BYTES - _LENGTH_BYTES:
            return _inside(block)
        rest = _tensor(data) if data is not None else torch.zeros(size, dtype=torch.uint8)
        self._broadcast(rest, self._wait_s)
        return rest.numpy().tobytes()

    def share(self, data: bytes) -> list[bytes]:
        """Everybody's `data`, by rank, on all ranks."""
        blocks = self._all_gather(_block(data))
        largest = max(map(_size_of, blocks))
        if largest <= BLOCK_BYTES - _LENGTH_BYTES:
            return [_inside(block) for block in blocks]
        padded = self._all_gather(_tensor(data.ljust(largest, b"\0")))
        return [each.numpy()[: _size_of(block)].tobytes() for each, block in zip(padded, blocks, strict=True)]

    def sum(self, table: Table) -> None:
        """Add up `table` over the ranks in place, modulo 2^64. It is contiguous and has the same size everywhere."""
        # Two's complement: the sum of the signed numbers wraps to the bits of the sum of the unsigned ones.
        tensor = torch.from_numpy(table.view(np.int64))
        self._wait(lambda: self._group.allreduce([tensor]))  # type: ignore[missing-attribute]

    def close(self) -> None:
        """Make no more calls. Idempotent; does not wait."""
        if self._broken and self._group is not None:
            abandon(self._group)
        self._broken = self._broken or "the crew is closed"
        self._group = None

    def _broadcast(self, tensor: torch.Tensor, wait_s: float) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=wait_s + GLOO_LATER_S)
        self._wait(lambda: self._group.broadcast([tensor], options), wait_s)  # type: ignore[missing-attribute]

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self._num_ranks)]
        self._wait(lambda: self._group.allgather([gathered], [tensor]))  # type: ignore[missing-attribute]
        return gathered

    def _wait(self, begin: Callable[[], dist.Work], wait_s: float = 0.0) -> None:
        """Run one collective to its end. Raises SiblingLost, after which this channel is of no use any more."""
        self._watch.check()
        if self._broken:
            raise SiblingLost(self._broken)
        wait_s = wait_s or self._wait_s
        until_s = time.monotonic() + wait_s
        work = None
        try:
            work = begin()
            while not self._ended(work):
                self._watch.check()
                if time.monotonic() > until_s:
                    raise SiblingLost(
                        f"rank {self._rank} of {self._num_ranks} waited {wait_s:g} s in vain for its siblings "
                        "to come to the same point; they are alive: find where their training threads stand"
                    )
        except SiblingLost as error:
            self._broken = str(error)
            raise
        except RuntimeError as error:
            self._broken = f"rank {self._rank} of {self._num_ranks} lost a sibling: {first_line(error)}"
            self._watch.check_soon()  # it has the better words, and knows whom
            raise SiblingLost(self._broken) from error
        finally:
            if work is None or not work.is_completed():
                # A thread of gloo's goes on with it, and must not be the last that holds a thing of Python's: it may
                # let go of it in the middle of the interpreter's end.
                self._broken = self._broken or "a call of the crew was interrupted"
                abandon(begin)
                abandon(work)

    def _ended(self, work: dist.Work) -> bool:
        """Wait a little. In slices, so that a signal's handler gets its turn."""
        try:
            work.wait(timedelta(seconds=SLICE_S))
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # it may have ended well just after the slice did: only its own error counts
        return True


def _tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _block(data: bytes) -> torch.Tensor:
    """The size, and as much of `data` as fits."""
    if len(data) > MAX_BYTES:
        raise ValueError(
            f"{len(data)} bytes are above the limit of {MAX_BYTES} for one message between ranks"
        )
    room = BLOCK_BYTES - _LENGTH_BYTES
    return _tensor(len(data).to_bytes(_LENGTH_BYTES, "little") + data[:room].ljust(room, b"\0"))


def _size_of(block: torch.Tensor) -> int:
    size = int.from_bytes(block.numpy()[:_LENGTH_BYTES].tobytes(), "little")
    if size > MAX_BYTES:
        raise SiblingLost(
            f"a sibling announced a message of {size} bytes; the ranks are not at the same point"
        )
    return size


def _inside(block: torch.Tensor) -> bytes:
    return block.numpy()[_LENGTH_BYTES : _LENGTH_BYTES + _size_of(block)].tobytes()
