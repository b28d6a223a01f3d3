"""A trainer's side of saving without a run: a small state, staging, a saver, and the events it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from atoll.checkpoint.saver import Keeping, Saver
from atoll.checkpoint.trees import Leaf, safetensors_parts, take_apart
from atoll.diloco.outer import OuterState
from atoll.events import Event
from atoll.recovery.donor import Donor
from atoll.recovery.folder import RAM

NUMEL = 3000
WAIT_S = 60.0


@dataclass
class Bench:
    """One peer that saves. `state` is changed by `advance`."""

    saver: Saver
    donor: Donor
    place: Path
    state: OuterState
    events: list[Event] = field(default_factory=list)

    def advance(self, version: int) -> None:
        self.state.anchor[:] = np.arange(self.state.anchor.size, dtype=np.float32) + version
        self.state.velocity[:] = version
        self.state.version = self.state.round = version
        self.state.step = 10 * version

    def save(self, version: int, *, term: int = 1, wait: bool = True, uploads: bool = False) -> None:
        """Advance to a version and save it."""
        self.advance(version)
        self.save_as_it_is(term=term, wait=wait, uploads=uploads)

    def save_as_it_is(
        self, *, term: int = 1, wait: bool = True, digest: str | None = None, uploads: bool = False
    ) -> None:
        leaves: list[Leaf] = []
        version = self.state.version
        tree = {"moments": torch.full((7,), float(version)), "note": f"of version {version}"}
        own_state = {"inner": take_apart(tree, "inner", leaves)}
        self.saver.save(
            self.state,
            self.state.tables if digest else None,
            safetensors_parts(leaves),
            msgspec.json.encode(own_state),
            digest=digest or self.state.digest(),
            term=term,
            uploads=uploads,
        )
        if wait:
            self.saver.wait(WAIT_S)

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@contextmanager
def bench(
    tmp_path: Path,
    *,
    place: Path | None = None,
    ram: Path = RAM,
    fallback: Path | None = None,
    peer: str = "a",
    numel: int = NUMEL,
    **keeping: Any,
) -> Iterator[Bench]:
    place = place or tmp_path / "place"
    donor = Donor(
        run="run",
        peer=peer,
        session_key=b"k" * 32,
        bind_host="127.0.0.1",
        fallback=fallback or tmp_path / "out",
        keep_bytes=0,
        pin_bytes=0,
        ram=ram,
    )
    events: list[Event] = []
    saver = Saver(Keeping(place, **keeping), run="run", peer=peer, staging=donor, emit=events.append)
    with donor:
        state = OuterState(np.zeros(numel, dtype=np.float32))
        try:
            yield Bench(saver, donor, place, state, events)
        finally:
            saver.close(WAIT_S)
