"""Beginning a run anew where there are checkpoints of it."""

from __future__ import annotations

from pathlib import Path

from atoll.checkpoint.folder import CheckpointFolder
from atoll.checkpoint.remote import RemotePlace
from atoll.errors import ConfigError, LocalError


def give_up(path: Path, *, force: bool, remote: str = "") -> list[int]:
    """Remove the checkpoints in a place, and in the remote one; which versions. Without `force` ConfigError, if there
    are any."""
    folder = CheckpointFolder(path)
    if remote:
        _give_up_remote(RemotePlace.at(remote), remote, force)
    found = folder.all_versions()
    if not found:
        return []
    if not force:
        raise ConfigError(
            f"--fresh: {path} has checkpoints, the newest of version {found[0]}; add --force to give them up, "
            "or begin under another run.name"
        )
    try:
        with folder.turn():
            (path / "latest").unlink(missing_ok=True)
            for version in found:
                folder.delete(version)
            folder.delete_own(sorted(folder.own_versions_of_all()))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise LocalError(
            f"cannot remove the checkpoints in {path}: {reason}; give another checkpoint.path"
        ) from None
    return found


def _give_up_remote(place: RemotePlace, address: str, force: bool) -> None:
    versions = place.all_versions()
    if versions and not force:
        raise ConfigError(
            f"--fresh: {address} has checkpoints, the newest of version {versions[0]}; add --force to give them up, "
            "or begin under another run.name"
        )
    if versions:
        place.objects.delete("latest")
    for version in versions:
        place.delete(version)
