"""Donors in tests, with real sidecars: crews of them, and what they hold of a history."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from atoll.recovery.donor import Donor
from atoll.recovery.folder import RAM
from atoll.recovery.targets import Source, Target
from atoll.state.snapshot import SharedState
from support.history import History

RUN = "run"
KEY = b"k" * 32
KEEP_BYTES = 1 << 30


def target_of(history: History, donors: Sequence[Donor], trusted: bool = True) -> Target:
    return Target(history.state.version, dict(history.digests), sources_of(donors), trusted)


def sources_of(donors: Sequence[Donor]) -> tuple[Source, ...]:
    return tuple(Source(name_of(donor), "127.0.0.1", donor.port) for donor in donors)


def name_of(donor: Donor) -> str:
    return donor._peer


def key_of(donor: Donor) -> bytes:
    return donor._key


@contextlib.contextmanager
def crew(tmp_path: Path, count: int = 3, **options: float) -> Iterator[list[Donor]]:
    """Donors p0, p1, ...; closed at the end, sidecars and folders with them."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(new_donor(tmp_path, f"p{number}", **options)) for number in range(count)]


def new_donor(
    tmp_path: Path,
    peer: str = "p0",
    max_bytes_per_s: float = 0.0,
    keep_bytes: int = KEEP_BYTES,
    pin_bytes: int = KEEP_BYTES,
    ram: Path = RAM,
) -> Donor:
    return Donor(
        run=RUN,
        peer=peer,
        session_key=KEY,
        bind_host="127.0.0.1",
        fallback=tmp_path / f"fallback-{peer}",
        keep_bytes=keep_bytes,
        pin_bytes=pin_bytes,
        max_bytes_per_s=max_bytes_per_s,
        ram=ram,
    )


def commit_to(history: History, donors: Sequence[Donor], count: int = 1) -> None:
    """So many commits, which all donors write down."""
    for _ in range(count):
        update, data = history.commit()
        for donor in donors:
            donor.keep(update, data)


def stage_at(state: SharedState, donors: Sequence[Donor]) -> None:
    """All donors stage this version and serve it."""
    for donor in donors:
        assert donor.stage(state)
        donor.start_serving()


def staged_shard(donor: Donor, version: int) -> Path:
    """The file that a donor staged for a version."""
    assert donor.folder is not None
    (found,) = (donor.folder / "snapshots").glob(f"{version}-*/shard-00000.safetensors")
    return found


def within(seconds: float, holds: Callable[[], object], what: str) -> None:
    """Wait until something holds, for at most `seconds`."""
    end_s = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end_s, f"{what} did not happen within {seconds:g} s"
        time.sleep(0.01)
