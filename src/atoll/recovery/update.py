"""An update: the finished bytes of a commit and all that the outer step read, so that any peer can take it again.

Replaying is the arithmetic of a round below its commit line (`diloco.round`): decode, outer step, version, round and
step. The same bytes on the same anchor give the same bits.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from atoll import kernels
from atoll.kernels import Bytes, Floats
from atoll.plan.grid import Grid
from atoll.runs import Runs
from atoll.state.snapshot import SharedState
from atoll.values import CODECS, Contribution, OpId

PIECE_BYTES: Final = 4 * kernels.PIECE
"""A snapshot's piece has so many bytes; an update's never more."""
_LEAST_PIECE_BYTES: Final = 256 << 10
_PIECES: Final = 16
"""A small update is cut in so many, so that all connections have a part in it."""


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """The commit that made `version`, apart from its finished bytes (`wire_bytes` of them, with `result_digest`).

    `step` is the run's step before the round, `boundaries` are the grid's, in the order of the op (`plan.routes`):
    the stretches `order` of the model's vector, start and stop, one after the other; none: the model's own order. Of
    several routes `routes` are the bytes at which they begin, and the end; none: there is one.
    """

    version: int
    op: OpId
    round: int
    step: int
    inner_steps: int
    lr: float
    momentum: float
    nesterov: bool
    codec: str
    contributions: tuple[Contribution, ...]
    boundaries: tuple[int, ...]
    wire_bytes: int
    result_digest: str
    order: tuple[tuple[int, int], ...] = ()
    routes: tuple[int, ...] = ()

    def runs(self) -> Runs:
        """How the model's vector lies in the finished bytes."""
        boundaries = np.asarray(self.boundaries, dtype=np.int64)
        if not self.order:
            return Runs.of_whole(boundaries)
        stretches = np.asarray(self.order, dtype=np.int64)
        return Runs(boundaries, stretches[:, 0], np.cumsum([0, *np.diff(stretches)[:, 0]]))


class UpdateHead(msgspec.Struct, frozen=True):
    """What is said about an update before its bytes: itself, and a digest of every piece."""

    update: Update
    pieces: tuple[str, ...]


def piece_bytes_of(wire_bytes: int) -> int:
    """In pieces of how many bytes an update is fetched and checked."""
    return min(PIECE_BYTES, max(_LEAST_PIECE_BYTES, -(-wire_bytes // _PIECES)))


def head_of(update: Update, data: Bytes) -> UpdateHead:
    """Reads the bytes once."""
    piece_bytes = piece_bytes_of(data.size)
    starts = range(0, data.size, piece_bytes)
    digests = tuple(kernels.digest_bytes(data[start : start + piece_bytes]).hex() for start in starts)
    return UpdateHead(update, digests)


def decode_head(data: bytes) -> UpdateHead:
    """Raises ValueError, with what is wrong, for anything that is no head or contradicts itself."""
    try:
        head = msgspec.json.decode(data, type=UpdateHead)
    except msgspec.MsgspecError as error:
        raise ValueError(f"it is no update ({error})") from None
    update = head.update
    if update.codec not in CODECS:
        raise ValueError(f"it has the unknown codec {update.codec!r}")
    sizes = np.diff(np.asarray(update.boundaries, dtype=np.int64))
    if len(sizes) == 0 or update.boundaries[0] != 0 or sizes.min() < 1:
        raise ValueError("its grid makes no sense")
    wire_bytes = Grid.of(sizes.tolist()).wire_bytes(update.codec)
    if update.wire_bytes != wire_bytes:
        raise ValueError(f"it has {update.wire_bytes} bytes, its grid takes {wire_bytes} in {update.codec}")
    if len(head.pieces) != -(-wire_bytes // piece_bytes_of(wire_bytes)):
        raise ValueError(f"it has digests of {len(head.pieces)} pieces for {wire_bytes} bytes")
    _check_order(update)
    return head


def _check_order(update: Update) -> None:
    if update.order:
        stretches = sorted(update.order)
        begins, ends = [start for start, _ in stretches], [stop for _, stop in stretches]
        cuts = itertools.accumulate(stop - start for start, stop in update.order)
        once = begins == [0, *ends[:-1]] and ends[-1] == update.boundaries[-1]
        if not once or not all(map(operator.lt, begins, ends)) or not set(update.boundaries).issuperset(cuts):
            raise ValueError("its order makes no sense")
    if update.routes and not (
        update.routes[0] == 0
        and update.routes[-1] == update.wire_bytes
        and all(map(operator.lt, update.routes, update.routes[1:]))
    ):
        raise ValueError("its routes make no sense")


def result_digest_of(data: Bytes, routes: Sequence[int] = ()) -> str:
    """The digest of finished bytes, in hex, as members vote it (`comm.digests`); `routes` are an `Update`'s."""
    cuts = routes or (0, data.size)
    return kernels.result_digest([kernels.digest_bytes(data[a:b]) for a, b in itertools.pairwise(cuts)])


def replay(state: SharedState, update: Update, data: Bytes, mean: Floats | None = None) -> None:
    """Take an update that is the next after `state.version`. `mean` is scratch memory of the state's size, if at hand.

    Raises ValueError, with the state unchanged, if the update does not follow the state or the bytes are not its own.
    """
    numel = state.anchor.size
    if update.version != state.version + 1:
        raise ValueError(f"update {update.version} does not follow version {state.version}")
    if update.boundaries[-1] != numel:
        raise ValueError(
            f"update {update.version} is for {update.boundaries[-1]} elements, the state has {numel}"
        )
    if data.size != update.wire_bytes or result_digest_of(data, update.routes) != update.result_digest:
        raise ValueError(f"the bytes given for update {update.version} are not those of the commit")
    mean = np.empty(numel, dtype=np.float32) if mean is None else mean
    update.runs().decode(update.codec, data, mean)
    # ---- from here on the state changes, as below a round's commit line ----
    kernels.outer_step(
        state.anchor,
        state.velocity,
        mean,
        lr=update.lr,
        momentum=update.momentum,
        nesterov=update.nesterov,
    )
    state.version = update.version
    state.round = update.round
    state.step = update.step + update.inner_steps
