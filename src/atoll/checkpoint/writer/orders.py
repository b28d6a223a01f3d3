"""What a trainer and its writer say to each other, one JSON value a line: orders on stdin, answers on stdout."""

from __future__ import annotations

import msgspec


class Save(msgspec.Struct, frozen=True, kw_only=True):
    """Bring a staged version to the place. `snapshot` is its folder; `own` is the file of the peer's own part, whose
    first `own_bytes` are a safetensors file and whose next `state_bytes` are JSON; none of the latter, no own part. The
    files are opened at once, so they may lose their names afterwards. `uploads`: the shared part is for this peer to
    bring to `remote`."""

    version: int
    term: int
    run: str
    peer: str
    digest: str
    snapshot: str
    own: str
    own_bytes: int
    state_bytes: int
    place: str
    keep_last: int
    keep_every: int
    remote: str = ""
    uploads: bool = False


class Saved(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """It is in the place, verified, and `latest` leads to it. `shared_bytes` 0: another peer had written that part."""

    version: int
    shared_bytes: int
    own_bytes: int
    write_s: float
    verify_s: float
    removed: tuple[int, ...]


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """`latest` is what it was before."""

    version: int
    reason: str


class Uploaded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The remote place has it too; or it does not, and `reason` says why. Comes after `Saved`, if there is a remote."""

    version: int
    seconds: float
    shared: bool
    removed: tuple[int, ...] = ()
    reason: str = ""


Answer = Saved | Failed | Uploaded
