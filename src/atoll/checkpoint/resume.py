"""Which checkpoint a peer goes on from: the newest complete one in its place; a damaged one is named and passed over.

Every byte is checked before it counts. What the run makes of it is the coordinator's affair: it is told the version,
and who holds less than others catches up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from atoll.checkpoint.folder import CheckpointFolder, Latest, OwnManifest
from atoll.checkpoint.remote import RemotePlace
from atoll.errors import LocalError
from atoll.events import CheckpointDamaged, CheckpointFetched, Event
from atoll.state.snapshot import LoadedState, read_manifest, read_snapshot

_FETCH_S: Final = 120.0
"""For one object of a remote place, all attempts together."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """What was found. `own` None: there is no own part of this peer at that version, and `remarks` say why. `others`
    are the states of other peers' own parts at the same version, by peer."""

    state: LoadedState
    term: int
    digest: str
    own: tuple[OwnManifest, Path] | None
    others: dict[str, dict[str, Any]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def newest(
    path: Path, *, run: str, peer: str, numel: int, emit: Callable[[Event], None]
) -> Resumption | None:
    """The newest complete checkpoint of this run; None if there is none. Raises LocalError if what is there belongs to
    another run or model: nobody wants to begin anew over it without saying so."""
    folder = CheckpointFolder(path)
    whole = folder.versions()
    for version in folder.all_versions():
        if version not in {each.version for each in whole}:
            _tell_damaged(folder, version, emit)
    for each in whole:
        try:
            manifest = read_manifest(folder.shared(each.version))
            if manifest.run != run:
                raise _Foreign(f"belongs to run {manifest.run!r} and not to {run!r}")
            if manifest.numel != numel:
                raise _Foreign(f"has {manifest.numel} parameters and the model {numel}")
            state = read_snapshot(folder.shared(each.version), manifest)
            if not (np.isfinite(state.anchor).all() and np.isfinite(state.velocity).all()):
                raise LocalError("it is not finite")
        except _Foreign as error:
            raise LocalError(
                f"the checkpoint of version {each.version} in {path} {error}; give another checkpoint.path, or begin "
                "anew with --fresh --force"
            ) from None
        except LocalError as error:
            emit(CheckpointDamaged(version=each.version, reason=str(error)))
            continue
        own, remarks = _own_part(folder, peer, each.version, each.digest, emit)
        others = _others(folder, peer, each.version, each.digest)
        return Resumption(state, each.term, each.digest, own, others, remarks)
    return None


def fetch_latest(remote: str, path: Path, peer: str, emit: Callable[[Event], None]) -> bool:
    """Bring what the remote place's `latest` leads to into an empty place here, with this peer's own part, or the
    newest one before it; False if there is no `latest`. Blocks. Raises LocalError or DeadlineExceeded: nobody wants to
    begin anew because a store was away."""
    place, folder = RemotePlace.at(remote, deadline_s=_FETCH_S), CheckpointFolder(path)
    latest = place.latest()
    if latest is None:
        return False
    began_s = time.monotonic()
    # The own part first: once the shared part is here, nobody asks the remote place any more.
    own_version = _fetch_own(place, folder, peer, latest, emit)
    manifest = place.fetch(folder, latest.version)
    folder.set_latest(manifest)
    emit(
        CheckpointFetched(
            version=manifest.version,
            address=remote,
            seconds=time.monotonic() - began_s,
            own_version=own_version,
        )
    )
    return True


def _fetch_own(
    place: RemotePlace, folder: CheckpointFolder, peer: str, latest: Latest, emit: Callable[[Event], None]
) -> int | None:
    """Which version has it; None if none has. The same choice as `_own_part`."""
    for version in place.own_versions_of(peer):
        if version > latest.version:
            continue
        try:
            manifest = place.fetch_own(folder, peer, version)
        except LocalError as error:
            emit(CheckpointDamaged(version=version, reason=str(error)))
            continue
        if version < latest.version or manifest.digest == latest.digest:
            return version
        folder.remove_own(peer, version)  # of a history that was rolled back
    return None


class _Foreign(Exception):
    pass


def _tell_damaged(folder: CheckpointFolder, version: int, emit: Callable[[Event], None]) -> None:
    try:
        read_manifest(folder.shared(version))
    except LocalError as error:
        emit(CheckpointDamaged(version=version, reason=str(error)))


def _own_part(
    folder: CheckpointFolder, peer: str, version: int, digest: str, emit: Callable[[Event], None]
) -> tuple[tuple[OwnManifest, Path] | None, tuple[str, ...]]:
    """The own part of this version; else the newest one before it, which is better than none."""
    for each in folder.own_versions(peer):
        if each > version:
            continue
        try:
            own = folder.read_own(peer, each)
        except LocalError as error:
            emit(CheckpointDamaged(version=each, reason=str(error)))
            continue
        if each == version and own[0].digest != digest:
            continue  # of a history that was rolled back
        older = (
            f"the newest part of {peer}'s own is of version {each}: its optimizer and data go on from there"
        )
        return own, () if each == version else (older,)
    return None, (f"nothing of {peer}'s own was saved with it: its inner optimizer begins fresh",)


def _others(folder: CheckpointFolder, peer: str, version: int, digest: str) -> dict[str, dict[str, Any]]:
    """What can be read of other peers' parts: where they stood in the data."""
    found = {}
    for name in folder.peers():
        manifest = folder.peek_own(name, version)
        if manifest is not None and manifest.peer != peer and manifest.digest == digest:
            found[manifest.peer] = manifest.state
    return found
