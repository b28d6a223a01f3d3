"""The own part of a peer of several ranks: one file, into which each rank writes its tensors, and one JSON.

The JSON is that of rank 0; under RANKS it says how many ranks there were, and what the others held. A peer with as many
ranks takes all of it back. With another number the inner optimizer's rows are cut anew (`state.inner_rows`), and all
ranks take rank 0's counters, schedulers and buffers; what the codec owed is dropped, which is said.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from atoll.checkpoint.own_part import OwnPart
from atoll.checkpoint.trees import Entry, bytes_of, entries_of, safetensors_header
from atoll.diloco.scribe import Page, Scribe, write_all
from atoll.mesh.crew import Crew
from atoll.state.elsewhere import Elsewhere, OwnBytes

RANKS: Final = "ranks"
INNER: Final = "inner"
RESIDUAL: Final = "residual"
BY_RANK: Final = (INNER, RESIDUAL)
"""What is cut as the ranks are."""
OF_RANK_0: Final = ("random", "data")
"""What no other rank may have alike, or needs."""


class _Share(msgspec.Struct, frozen=True):
    """What a rank's part consists of."""

    state: dict[str, Any]
    entries: list[Entry]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.entries)


class RankedPart:
    """An own part at one moment, as one rank of several has it. Made by all ranks at the same line."""

    def __init__(self, own: OwnPart, crew: Crew) -> None:
        """Raises LocalError, on all ranks, if one holds something that a checkpoint cannot."""
        leaves = []

        def take() -> _Share:
            taken = own.take(f"rank{crew.rank}/" if crew.rank else "")
            leaves.extend(bytes_of(taken.leaves))
            return _Share(taken.state, entries_of(taken.leaves))

        shares = crew.agree(_Share, take)
        self._bytes = leaves
        self._before = sum(each.nbytes for each in shares[1 : crew.rank])
        self._others = sum(each.nbytes for each in shares[1:])
        self._entries = [entry for share in shares for entry in share.entries]
        self.state: dict[str, Any] = {
            **shares[0].state,
            RANKS: {"count": crew.num_ranks, "others": [share.state for share in shares[1:]]},
        }

    def parts(self, scribe: Scribe) -> list[OwnBytes]:
        """For rank 0: the bytes of the file, those of the others included."""

        def put(path: Path, at: int) -> None:
            scribe.put("own", path, at)

        return [safetensors_header(self._entries), *self._bytes, Elsewhere(self._others, put)]

    def write(self, page: Page, *, is_lead: bool) -> None:
        """This rank's bytes, on the others. Raises OSError."""
        if is_lead:
            return
        fd = os.open(page.path, os.O_WRONLY)
        try:
            at = page.at[0] + self._before
            for part in self._bytes:
                write_all(fd, part, at)
                at += part.nbytes
        finally:
            os.close(fd)


def part_of_rank(state: Mapping[str, Any], rank: int, num_ranks: int) -> tuple[dict[str, Any], str]:
    """What a rank takes of a saved own part, and a remark if that is cut otherwise: then the inner optimizer's states
    are those of all ranks that saved it."""
    own = {name: each for name, each in state.items() if name != RANKS}
    ranks = state.get(RANKS) or {"count": 1, "others": []}
    count: int = ranks["count"]
    if count == num_ranks:
        return (own if rank == 0 else dict(ranks["others"][rank - 1])), ""
    mine = () if rank == 0 else OF_RANK_0
    taken = {name: each for name, each in own.items() if name not in (*BY_RANK, *mine)}
    if INNER in own:
        taken[INNER] = [own[INNER], *(each.get(INNER) for each in ranks["others"])]
    dropped = "; what the codec still owed is dropped" if RESIDUAL in own else ""
    were = "1 rank" if count == 1 else f"{count} ranks"
    return taken, (
        f"it was saved by {were} and this peer has {num_ranks}: its inner optimizer's state is cut anew{dropped}"
    )
