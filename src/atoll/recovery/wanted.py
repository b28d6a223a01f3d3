"""What a joiner fetches: a snapshot, or an update; where its pieces lie at each source, and how they are checked.

Before a source gives a piece it is *introduced*: its manifest, or its head of the update, is read and must agree with
what is known. So a piece that does not fit is its own fault, and it can be named. Used by the fetch thread; the
training thread reads the results when all pieces are there.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll import kernels
from atoll.kernels import Bytes, Floats
from atoll.recovery.board import Item
from atoll.recovery.held import Stock
from atoll.recovery.targets import Source
from atoll.recovery.update import Update, UpdateHead, decode_head, piece_bytes_of
from atoll.state import manifest as manifests
from atoll.state.manifest import VALUE_BYTES, VECTORS, Manifest, Span, Vector
from atoll.state.snapshot import SharedState

_MOST_BYTES_PER_ELEMENT = 32  # no codec writes more, even where every parameter has only one


def most_update_bytes(numel: int) -> int:
    """More than any update of a model has. Before memory is taken for what somebody told."""
    return numel * _MOST_BYTES_PER_ELEMENT


class DisagreesError(Exception):
    """Two sources tell different things, and nobody knows which is right yet."""


class Wanted(Item, Protocol):
    """An item that knows its sources."""

    @property
    def name(self) -> str:
        """For sentences: "the snapshot of version 7"."""
        ...

    def head_at(self, source: Source, stock: Stock) -> str | None:
        """Where this source has what introduces it; None if it does not give this item."""
        ...

    def is_introduced(self, source: Source, head: str) -> bool: ...

    def introduce(self, source: Source, head: str, data: bytes) -> None:
        """Raises ValueError, with what is wrong with it, or DisagreesError."""
        ...

    def spans(self, source: Source, number: int) -> tuple[Span, ...]:
        """Where an introduced source has a piece."""
        ...

    def has_already(self, number: int) -> bool:
        """Whether this peer has the piece, as is known once a source was introduced."""
        ...

    def fits(self, number: int, data: Bytes) -> bool: ...

    def deliver(self, number: int, data: Bytes) -> None:
        """Once for each piece, with data that fit."""
        ...


class WantedSnapshot:
    """A snapshot that is read over a state, in place: pieces that the state has already are not fetched."""

    def __init__(
        self, version: int, digest: str, run: str, state: SharedState, own: dict[Vector, list[str]]
    ) -> None:
        """`own` are the state's digest tables. The state's vectors change from the first piece on."""
        self.version = version
        self._digest, self._run, self._state, self._own = digest, run, state, own
        self._manifests: dict[Source, tuple[str, Manifest]] = {}
        self._numel = state.anchor.size
        self._numbers = range(len(VECTORS) * -(-self._numel // kernels.PIECE))
        self.touched = False  # whether the state's vectors are a mixture by now

    @property
    def name(self) -> str:
        return f"the snapshot of version {self.version}"

    @property
    def round_and_step(self) -> tuple[int, int]:
        """What most of the introduced sources say: no digest covers them."""
        votes = Counter((each.round, each.step) for _, each in self._manifests.values())
        return votes.most_common(1)[0][0]

    def pieces(self) -> tuple[int, ...]:
        return tuple(self._numbers)

    def piece_bytes(self, number: int) -> int:
        _, start, stop = self._place(number)
        return (stop - start) * VALUE_BYTES

    def head_at(self, source: Source, stock: Stock) -> str | None:
        found = stock.snapshots.get(self.version)
        return f"{found.folder}/{manifests.MANIFEST}" if found else None

    def is_introduced(self, source: Source, head: str) -> bool:
        return source in self._manifests and self._manifests[source][0] == head

    def introduce(self, source: Source, head: str, data: bytes) -> None:
        manifest = manifests.decode(data)
        if (manifest.run, manifest.version) != (self._run, self.version):
            raise ValueError(f"it is version {manifest.version} of run {manifest.run!r}")
        if manifest.numel != self._numel:
            raise ValueError(f"it has {manifest.numel} elements, this peer's model {self._numel}")
        if manifest.digest != self._digest:
            raise ValueError(f"it has digest {manifest.digest[:12]}, the run's is {self._digest[:12]}")
        self._manifests[source] = (head, manifest)

    def spans(self, source: Source, number: int) -> tuple[Span, ...]:
        head, manifest = self._manifests[source]
        folder = head.removesuffix(manifests.MANIFEST)
        found = manifest.spans(*self._place(number))
        return tuple(Span(folder + span.file, span.offset, span.size_bytes) for span in found)

    def has_already(self, number: int) -> bool:
        """Whether the state's own piece is the right one. Once a source was introduced."""
        vector, start, _ = self._place(number)
        _, manifest = next(iter(self._manifests.values()))
        piece = start // kernels.PIECE
        return self._own[vector][piece] == manifest.row(vector, piece)

    def fits(self, number: int, data: Bytes) -> bool:
        vector, start, _ = self._place(number)
        _, manifest = next(iter(self._manifests.values()))
        return manifests.rows_of(_floats(data), start) == [manifest.row(vector, start // kernels.PIECE)]

    def deliver(self, number: int, data: Bytes) -> None:
        vector, start, stop = self._place(number)
        self.touched = True
        values = self._state.anchor if vector == "anchor" else self._state.velocity
        values[start:stop] = _floats(data)

    def _place(self, number: int) -> tuple[Vector, int, int]:
        vector, piece = divmod(number, len(self._numbers) // len(VECTORS))
        start = piece * kernels.PIECE
        return VECTORS[vector], start, min(start + kernels.PIECE, self._numel)


class Landing:
    """Memory for a file that comes in pieces, whose head has a digest of each: what is the same for all such files."""

    def __init__(self, size_bytes: int, piece_bytes: int) -> None:
        """`size_bytes` is what somebody told, and bounded by who asks for it; it comes in pieces of `piece_bytes`."""
        self.size_bytes, self._piece_bytes = size_bytes, piece_bytes
        self.data: NDArray[np.uint8] = np.empty(size_bytes, dtype=np.uint8)
        self.digests: tuple[str, ...] = ()  # of the pieces; of whoever was introduced

    def pieces(self) -> tuple[int, ...]:
        return tuple(range(-(-self.size_bytes // self._piece_bytes)))

    def piece_bytes(self, number: int) -> int:
        return min(self._piece_bytes, self.size_bytes - number * self._piece_bytes)

    def spans(self, file: str, number: int) -> tuple[Span, ...]:
        return (Span(file, number * self._piece_bytes, self.piece_bytes(number)),)

    def fits(self, number: int, data: Bytes) -> bool:
        return kernels.digest_bytes(data).hex() == self.digests[number]

    def deliver(self, number: int, data: Bytes) -> None:
        start = number * self._piece_bytes
        self.data[start : start + data.size] = data


class WantedUpdate:
    """An update, and memory for its finished bytes."""

    def __init__(self, version: int, size_bytes: int, numel: int) -> None:
        """`size_bytes`, at most `most_update_bytes`, is what sources told."""
        self.version, self._numel = version, numel
        self.givers: set[Source] = set()
        self._landing = Landing(size_bytes, piece_bytes_of(size_bytes))
        self._head: UpdateHead | None = None
        self._introduced: dict[Source, str] = {}
        self._unlike: set[Source] = set()

    @property
    def size_bytes(self) -> int:
        return self._landing.size_bytes

    @property
    def data(self) -> Bytes:
        return self._landing.data

    @property
    def name(self) -> str:
        return f"update {self.version}"

    @property
    def update(self) -> Update:
        assert self._head is not None, "a source is introduced before it gives a piece"
        return self._head.update

    def pieces(self) -> tuple[int, ...]:
        return self._landing.pieces()

    def piece_bytes(self, number: int) -> int:
        return self._landing.piece_bytes(number)

    def head_at(self, source: Source, stock: Stock) -> str | None:
        found = stock.updates.get(self.version)
        if found is None or found.size_bytes != self.size_bytes or source in self._unlike:
            return None
        return found.head

    def is_introduced(self, source: Source, head: str) -> bool:
        return self._introduced.get(source) == head

    def introduce(self, source: Source, head: str, data: bytes) -> None:
        told = decode_head(data)
        if told.update.version != self.version or told.update.wire_bytes != self.size_bytes:
            raise ValueError(f"it is update {told.update.version} of {told.update.wire_bytes} bytes")
        if told.update.boundaries[-1] != self._numel:
            raise ValueError(f"it has {told.update.boundaries[-1]} elements, this peer's model {self._numel}")
        if self._head is not None and told != self._head:
            self._unlike.add(source)
            raise DisagreesError
        self._head, self._landing.digests = told, told.pieces
        self._introduced[source] = head
        self.givers.add(source)

    def spans(self, source: Source, number: int) -> tuple[Span, ...]:
        return self._landing.spans(self._introduced[source].removesuffix(".json") + ".bin", number)

    def has_already(self, number: int) -> bool:
        return False

    def fits(self, number: int, data: Bytes) -> bool:
        return self._landing.fits(number, data)

    def deliver(self, number: int, data: Bytes) -> None:
        self._landing.deliver(number, data)


def _floats(data: Bytes) -> Floats:
    return data.view("<f4").astype(np.float32, copy=False)
