"""How the ranks of a peer write one file together: rank 0 says which and where, each writes its own part of it.

What a peer stages and keeps for others is whole, whatever its ranks, so that who fetches it need not know of them. A
file lies where all ranks of a peer see it (`/dev/shm` of their machine, or the staging folder that they share).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec
import numpy as np

from atoll.diloco.outer import Floats, OuterState
from atoll.errors import SiblingLost
from atoll.kernels import Bytes
from atoll.mesh.crew import LONG_S, Crew
from atoll.state.manifest import VALUE_BYTES

T = TypeVar("T")
Kind = Literal["state", "own", "wire", ""]
DONE: Final = ""


class Page(msgspec.Struct, frozen=True):
    """A file to write into. `at` are byte positions, as the kind has it: those of anchor and velocity, or where the
    bytes of all begin. The kind "" says that nothing more is to be written."""

    kind: Kind = DONE
    path: str = ""
    at: tuple[int, ...] = ()


Writer = Callable[[Page], None]
"""Writes this rank's part. Raises OSError."""


class Scribe:
    """Used on the training thread, by all ranks at the same line."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._writers: Mapping[Kind, Writer] = {}

    def together(self, writers: Mapping[Kind, Writer], work: Callable[[], T]) -> T | None:
        """Rank 0 does `work`, and `put`s pages meanwhile; the others write their part of each. Returns what `work`
        does, None on the others."""
        self._writers = writers
        if self._crew.is_lead:
            try:
                done = work()
            except BaseException:
                with suppress(SiblingLost):  # what happened first is what is told
                    self._crew.decide(Page, Page)
                raise
            if self._crew.num_ranks > 1:
                self._crew.decide(Page, Page)
            return done
        while (page := self._crew.hear(Page, within_s=LONG_S)).kind != DONE:
            self._write(page)
        return None

    def put(self, kind: Kind, path: Path, *at: int) -> None:
        """On rank 0, within `together`: every rank writes its part of this page. Raises OSError if one could not."""
        page = Page(kind, str(path), at)
        self._write(self._crew.decide(Page, lambda: page))

    def _write(self, page: Page) -> None:
        failure = ""
        try:
            self._writers[page.kind](page)
        except OSError as error:
            failure = (error.strerror or str(error)).lower()
        told = self._crew.share(str, failure)
        bad = [f"rank {rank}: {why}" for rank, why in enumerate(told) if why]
        if bad and self._crew.is_lead:
            raise OSError(errno.EIO, f"{bad[0]} (all ranks of a peer must see the staging folder)", page.path)


def write_state(page: Page, state: OuterState) -> None:
    """This rank's ranges of anchor and velocity."""
    fd = os.open(page.path, os.O_WRONLY)
    try:
        for values, at in zip((state.anchor, state.velocity), page.at, strict=True):
            done = 0
            for each in state.ranges:
                part = values[done : done + each.stop - each.start]
                write_all(fd, part.astype("<f4", copy=False).data.cast("B"), at + each.start * VALUE_BYTES)
                done += part.size
    finally:
        os.close(fd)


def write_bytes(page: Page, data: Bytes, places: Sequence[slice]) -> None:
    """These bytes, one after the other, at these places."""
    fd = os.open(page.path, os.O_WRONLY)
    try:
        done = 0
        for each in places:
            size = each.stop - each.start
            write_all(fd, data[done : done + size].data, each.start)
            done += size
    finally:
        os.close(fd)


def read_state(path: Path, state: OuterState) -> None:
    """This rank's ranges of a file that has the whole anchor, then the whole velocity, and nothing else."""
    with path.open("rb") as file:
        for vector, values in enumerate((state.anchor, state.velocity)):
            done = 0
            for each in state.ranges:
                file.seek((vector * state.numel + each.start) * VALUE_BYTES)
                part = values[done : done + each.stop - each.start]
                if file.readinto(part.data.cast("B")) != part.nbytes:
                    raise OSError(errno.EIO, "it ends too early", str(path))
                done += part.size


def whole_of(path: Path, state: OuterState, *, mapped: bool) -> OuterState:
    """The state of all ranks, on rank 0, after all wrote their parts: that file itself where it is RAM (`mapped`), else
    a copy of it. A disk that fails would end who has mapped it."""
    shape = (2, state.numel)
    both: Floats
    if mapped:
        both = np.memmap(path, dtype=np.float32, mode="r+", shape=shape)
    else:
        both = np.fromfile(path, dtype=np.float32).reshape(shape)
    whole = OuterState(both[0])
    whole.velocity = both[1]
    whole.version, whole.round, whole.step = state.version, state.round, state.step
    return whole


def write_all(fd: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)
