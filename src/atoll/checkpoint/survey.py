"""What a place holds, for people: every version, whole or not, and whose own parts lie beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from atoll.checkpoint.folder import PARTIAL, CheckpointFolder
from atoll.errors import LocalError
from atoll.state.manifest import MANIFEST
from atoll.state.snapshot import read_manifest
from atoll.state.verify import verify_snapshot


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One version. `problem` is a sentence, "" for none; `peers` have their own part beside it."""

    version: int
    term: int = 0
    round: int = 0
    step: int = 0
    digest: str = ""
    size_bytes: int
    saved_s: float
    latest: bool = False
    peers: tuple[str, ...] = ()
    problem: str = ""


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What reading every byte of one part showed. `peer` "" for the shared part."""

    version: int
    peer: str = ""
    size_bytes: int
    seconds: float
    problem: str = ""


def survey(place: CheckpointFolder) -> list[Row]:
    """All versions, newest first. Reads manifests, not the values."""
    latest = place.latest()
    parts: dict[int, list[str]] = {}
    for name in place.peers():
        for version in place.own_versions(name):
            parts.setdefault(version, []).append(name)
    return [
        _row(place, version, tuple(parts.get(version, ())), latest is not None and latest.version == version)
        for version in place.all_versions()
    ]


def unfinished(place: CheckpointFolder) -> list[str]:
    """What writers left that died at work; the next save removes it."""
    roots = (place.path, place.path / "shared", *(place.path / "peers" / name for name in place.peers()))
    return sorted(
        str(entry.relative_to(place.path))
        for root in roots
        if root.is_dir()
        for entry in root.glob(f".*{PARTIAL}")
    )


def verify(place: CheckpointFolder, versions: list[int]) -> Iterator[Verified]:
    """Read every byte of these versions and of the own parts beside them, and compare it with all sums."""
    for version in versions:
        folder = place.shared(version)
        began_s = time.monotonic()
        problem = _problem_of(lambda folder=folder: verify_snapshot(folder, hashed=True))
        seconds = time.monotonic() - began_s
        yield Verified(version=version, size_bytes=_size(folder), seconds=seconds, problem=problem)
        for name in place.peers():
            if version not in place.own_versions(name):
                continue
            began_s = time.monotonic()
            own = place.path / "peers" / name / folder.name
            problem = _problem_of(lambda name=name, version=version: place.read_own_in(name, version))
            seconds = time.monotonic() - began_s
            yield Verified(
                version=version, peer=name, size_bytes=_size(own), seconds=seconds, problem=problem
            )


def _row(place: CheckpointFolder, version: int, peers: tuple[str, ...], latest: bool) -> Row:
    folder = place.shared(version)
    size_bytes, saved_s = _size(folder), _time(folder)
    try:
        manifest = read_manifest(folder)
        for shard in manifest.shards:
            if not (folder / shard.file).is_file():
                raise LocalError(f"{shard.file} is missing")
            if (folder / shard.file).stat().st_size != shard.size_bytes:
                raise LocalError(f"{shard.file} does not have its {shard.size_bytes} bytes")
    except (LocalError, OSError) as error:
        problem = str(error)
        return Row(
            version=version,
            size_bytes=size_bytes,
            saved_s=saved_s,
            latest=latest,
            peers=peers,
            problem=problem,
        )
    return Row(
        version=version,
        term=manifest.term,
        round=manifest.round,
        step=manifest.step,
        digest=manifest.digest,
        size_bytes=size_bytes,
        saved_s=saved_s,
        latest=latest,
        peers=peers,
    )


def _problem_of(work: Callable[[], object]) -> str:
    try:
        work()
    except LocalError as error:
        return str(error)
    return ""


def _size(folder: Path) -> int:
    try:
        return sum(entry.stat().st_size for entry in folder.iterdir() if entry.is_file())
    except OSError:
        return 0


def _time(folder: Path) -> float:
    for path in (folder / MANIFEST, folder):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return 0.0
