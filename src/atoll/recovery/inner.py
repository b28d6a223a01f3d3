"""A donor's inner optimizer state: staged beside a snapshot, and fetched by a joiner that begins with it.

Every peer has its own, so all of it comes from one source. To this room it is bytes; `state.inner_state` reads them.
The head has a digest of every piece, and goes over the wire under the session key's proof.
"""

from __future__ import annotations

from typing import Final

import msgspec

from atoll import kernels
from atoll.kernels import Bytes
from atoll.recovery.held import INNER_DATA, INNER_HEAD, Stock
from atoll.recovery.targets import Source
from atoll.recovery.update import PIECE_BYTES
from atoll.recovery.wanted import Landing
from atoll.state.manifest import Span

FORMAT: Final = 1
_MOST_BYTES_PER_ELEMENT = 64
_SLACK_BYTES = 16 << 20


class InnerHead(msgspec.Struct, frozen=True):
    """What is said of it before its bytes. `version` is the one that the donor trained on from."""

    version: int
    size_bytes: int
    pieces: tuple[str, ...]
    format: int = FORMAT


def head_of(version: int, data: Bytes) -> InnerHead:
    starts = range(0, data.size, PIECE_BYTES)
    digests = tuple(kernels.digest_bytes(data[start : start + PIECE_BYTES]).hex() for start in starts)
    return InnerHead(version, data.size, digests)


def most_inner_bytes(numel: int) -> int:
    """More than any optimizer keeps for a model. Before memory is taken for what somebody told."""
    return numel * _MOST_BYTES_PER_ELEMENT + _SLACK_BYTES


class WantedInner:
    """The inner state that one source staged with the snapshot of `version`, and memory for it."""

    def __init__(self, version: int, source: Source, size_bytes: int) -> None:
        """`size_bytes`, at most `most_inner_bytes`, is what the source told."""
        self.version = version
        self._landing = Landing(size_bytes, PIECE_BYTES)
        self._source = source
        self._introduced = ""

    @property
    def size_bytes(self) -> int:
        return self._landing.size_bytes

    @property
    def data(self) -> Bytes:
        return self._landing.data

    @property
    def name(self) -> str:
        return f"the inner state of {self._source.peer} at version {self.version}"

    def pieces(self) -> tuple[int, ...]:
        return self._landing.pieces()

    def piece_bytes(self, number: int) -> int:
        return self._landing.piece_bytes(number)

    def head_at(self, source: Source, stock: Stock) -> str | None:
        found = stock.snapshots.get(self.version)
        if source != self._source or found is None or found.inner_bytes != self.size_bytes:
            return None
        return f"{found.folder}/{INNER_HEAD}"

    def is_introduced(self, source: Source, head: str) -> bool:
        return self._introduced == head

    def introduce(self, source: Source, head: str, data: bytes) -> None:
        try:
            told = msgspec.json.decode(data, type=InnerHead)
        except msgspec.MsgspecError as error:
            raise ValueError(f"it is no inner state ({error})") from None
        if (told.format, told.version, told.size_bytes) != (FORMAT, self.version, self.size_bytes):
            raise ValueError(
                f"it is of version {told.version}, format {told.format}, {told.size_bytes} bytes"
            )
        if len(told.pieces) != len(self.pieces()):
            raise ValueError(f"it has digests of {len(told.pieces)} pieces for {self.size_bytes} bytes")
        self._landing.digests, self._introduced = told.pieces, head

    def spans(self, source: Source, number: int) -> tuple[Span, ...]:
        return self._landing.spans(self._introduced.removesuffix(INNER_HEAD) + INNER_DATA, number)

    def has_already(self, number: int) -> bool:
        return False

    def fits(self, number: int, data: Bytes) -> bool:
        return self._landing.fits(number, data)

    def deliver(self, number: int, data: Bytes) -> None:
        self._landing.deliver(number, data)
