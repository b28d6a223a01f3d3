"""The values of a catch-up: whom to ask, where to, and how it went."""

from __future__ import annotations

import msgspec

from atoll.values import Source


class Target(msgspec.Struct, frozen=True):
    """The run's newest version, the digests of versions as far as the coordinator knows them, and whom to ask.

    `trusted` False: what this peer holds is wrong, or of a history that was rolled back: only a snapshot will do.
    """

    version: int
    digests: dict[int, str]
    sources: tuple[Source, ...]
    trusted: bool = True


class InnerTaken(msgspec.Struct, frozen=True):
    """A donor's inner optimizer state; or, with no `data`, `why` there is none."""

    data: bytes = b""
    donor: str = ""
    version: int = -1
    why: str = "no donor staged one with the snapshot"


class CaughtUp(msgspec.Struct, frozen=True):
    """How it went. Bytes are those that were fetched, whether they were of use or not; by peer. `inner` is there only
    if it was asked for."""

    version: int
    from_version: int
    snapshot_version: int | None
    fetched_bytes: int
    bytes_by_source: dict[str, int]
    updates: int
    seconds: float
    inner: InnerTaken | None = None
