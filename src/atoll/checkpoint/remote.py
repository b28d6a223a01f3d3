"""A place in an object store: S3, GCS, Azure, a folder or memory, through obstore (extra `[cloud]`).

The layout is that of a place on a disk (docs/checkpoint-format.md). What is put is read back and compared before
anything leads to it: shards first, their manifest after them, `latest` last; nothing is renamed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from atoll.checkpoint.folder import (
    FORMAT,
    MAX_MANIFEST_BYTES,
    OWN_FILE,
    CheckpointFolder,
    Found,
    Latest,
    OwnManifest,
    decode_own,
    plain_name,
)
from atoll.checkpoint.objects import DEADLINE_S, Objects
from atoll.checkpoint.retention import to_remove
from atoll.errors import LocalError
from atoll.state import manifest as manifests
from atoll.state.manifest import MANIFEST, Manifest
from atoll.state.snapshot import read_manifest
from atoll.state.verify import verify_snapshot


@dataclass(slots=True)
class RemotePlace:
    """One place. Raises as `Objects` does."""

    objects: Objects

    @staticmethod
    def at(address: str, *, deadline_s: float = DEADLINE_S) -> RemotePlace:
        """The place at an address: s3://, gs://, az://, file://, memory://. Raises ConfigError."""
        return RemotePlace(Objects.at(address, deadline_s=deadline_s))

    # ---- reading -------------------------------------------------------------------------------------------------

    def versions(self) -> list[Found]:
        """The shared parts whose manifest is sound, newest first."""
        return sorted((Found(m.term, m.version, m.digest) for m in self._manifests()), reverse=True)

    def all_versions(self) -> list[int]:
        """Whatever lies under a version's name, newest first, unfinished ones too."""
        names = {key.partition("/")[0] for key in self.objects.sizes("shared/")}
        return sorted((int(name) for name in names if _is_version(name)), reverse=True)

    def own_versions(self) -> dict[int, list[str]]:
        """Whose own parts are whole, by version: the names of their folders, sorted."""
        found: dict[int, list[str]] = {}
        for key in sorted(self.objects.sizes("peers/")):
            name, _, rest = key.partition("/")
            version, _, file = rest.partition("/")
            if _is_version(version) and file == MANIFEST:
                found.setdefault(int(version), []).append(name)
        return found

    def latest(self) -> Latest | None:
        """What `latest` says; None if there is none, or nobody can read it."""
        data = self.objects.read("latest", 4096)
        try:
            said = msgspec.json.decode(data or b"", type=Latest)
        except msgspec.MsgspecError:
            return None
        return said if said.format == FORMAT else None

    def manifest(self, version: int) -> Manifest:
        """Checked against itself."""
        key = f"shared/{version:08d}/{MANIFEST}"
        data = self.objects.read(key, MAX_MANIFEST_BYTES)
        if data is None:
            raise LocalError(f"{self.objects.address} has no whole version {version}: {key} is not there")
        try:
            manifest = manifests.decode(data)
        except ValueError as error:
            raise LocalError(
                f"{self.objects.address}/{key} is damaged: {error}; use another version"
            ) from None
        if manifest.version != version:
            raise LocalError(
                f"{self.objects.address}/{key} says version {manifest.version}; use another version"
            )
        return manifest

    def fetch(self, folder: CheckpointFolder, version: int | None = None) -> Manifest:
        """Bring a version (None: the latest) to a place on a disk: nothing has its name there before all of it was
        checked. One that is there already, whole, is not fetched."""
        if version is None:
            latest = self.latest()
            if latest is None:
                raise LocalError(f"{self.objects.address} holds no checkpoint that `latest` leads to")
            version = latest.version
        manifest = self.manifest(version)
        final = folder.shared(version)
        with folder.turn():
            with contextlib.suppress(LocalError):
                if verify_snapshot(final).digest == manifest.digest:
                    return manifest
            sizes = self.objects.sizes(f"shared/{version:08d}/")
            for shard in manifest.shards:  # before anything is written
                self.objects.expect_size(
                    f"shared/{version:08d}/{shard.file}", sizes.get(shard.file), shard.size_bytes
                )
            folder.sweep()
            folder.delete(version)
            try:
                with folder.draft(final) as partial:
                    for shard in manifest.shards:
                        key = f"shared/{version:08d}/{shard.file}"
                        self.objects.download(key, partial / shard.file, shard.size_bytes, shard.sha256)
                    (partial / MANIFEST).write_bytes(manifests.encode(manifest))
                    verify_snapshot(partial, from_disk=False)
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                raise LocalError(
                    f"cannot bring version {version} to {folder.path}: {reason}; free some space"
                ) from None
        return manifest

    def own_versions_of(self, peer: str) -> list[int]:
        """Where this peer has an own part whose manifest is there, newest first."""
        names = self.objects.sizes(f"peers/{plain_name(peer)}/")
        found = (key.partition("/") for key in names)
        return sorted((int(v) for v, _, file in found if file == MANIFEST and _is_version(v)), reverse=True)

    def fetch_own(self, folder: CheckpointFolder, peer: str, version: int) -> OwnManifest:
        """Bring a peer's own part to a place on a disk, whole or not at all; one that is there already is kept."""
        prefix = f"peers/{plain_name(peer)}/{version:08d}"
        with folder.turn():
            with contextlib.suppress(LocalError):
                return folder.read_own(peer, version)[0]
            data = self.objects.read(f"{prefix}/{MANIFEST}", MAX_MANIFEST_BYTES)
            try:
                manifest = decode_own(data or b"", peer, version)
            except ValueError as error:
                raise LocalError(f"{self.objects.address}/{prefix}/{MANIFEST} is damaged: {error}") from None
            (file,) = manifest.files
            key = f"{prefix}/{OWN_FILE}"
            self.objects.expect_size(key, self.objects.size(key), file.size_bytes)
            folder.sweep()
            folder.remove_own(peer, version)
            try:
                with folder.draft(folder.own(peer, version)) as partial:
                    self.objects.download(key, partial / OWN_FILE, file.size_bytes, file.sha256)
                    (partial / MANIFEST).write_bytes(msgspec.json.encode(manifest))
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                raise LocalError(
                    f"cannot bring {peer}'s own part of version {version} to {folder.path}: {reason}; free some space"
                ) from None
        return manifest

    # ---- writing -------------------------------------------------------------------------------------------------

    def publish(self, folder: CheckpointFolder, version: int) -> Manifest:
        """Bring a shared part here; `latest` leads to it once all of it was read back and is what it should be."""
        source = folder.shared(version)
        manifest = read_manifest(source)
        prefix = f"shared/{version:08d}"
        there = self.objects.read(f"{prefix}/{MANIFEST}", MAX_MANIFEST_BYTES)
        if there is not None and there != manifests.encode(manifest):
            self.delete(version)  # made again after a roll-back, or damaged
        for shard in manifest.shards:
            self.objects.bring(source / shard.file, f"{prefix}/{shard.file}", shard.size_bytes, shard.sha256)
        self.objects.put(f"{prefix}/{MANIFEST}", manifests.encode(manifest))
        good = Found(manifest.term, manifest.version, manifest.digest)
        if good >= self.versions()[0]:
            line = msgspec.json.encode(Latest(version=version, digest=manifest.digest)) + b"\n"
            self.objects.put("latest", line)
        return manifest

    def publish_own(self, folder: CheckpointFolder, peer: str, version: int) -> OwnManifest:
        """Bring a peer's own part here, its manifest last."""
        manifest, path = folder.read_own(peer, version)
        prefix = f"peers/{plain_name(peer)}/{version:08d}"
        (file,) = manifest.files
        self.objects.bring(path, f"{prefix}/{OWN_FILE}", file.size_bytes, file.sha256)
        self.objects.put(f"{prefix}/{MANIFEST}", msgspec.json.encode(manifest))
        return manifest

    def retain(self, good: Found, *, keep_last: int, keep_every: int) -> list[int]:
        """Remove what is not kept, with the own parts of it, now that `good` is here; returns the versions."""
        found = self.versions()
        damaged = set(self.all_versions()) - {each.version for each in found}
        removed = to_remove(found, good, damaged, keep_last=keep_last, keep_every=keep_every)
        for version in removed:
            self.delete(version)
        return removed

    def delete(self, version: int) -> None:
        """Remove a version and all own parts of it; manifests go first, so that nobody takes the rest for whole."""
        name = f"{version:08d}"
        own = [f"peers/{key}" for key in self.objects.sizes("peers/") if key.split("/")[1:2] == [name]]
        keys = [*(f"shared/{name}/{key}" for key in self.objects.sizes(f"shared/{name}/")), *own]
        for key in sorted(keys, key=lambda key: not key.endswith(f"/{MANIFEST}")):
            self.objects.delete(key)

    def _manifests(self) -> Iterator[Manifest]:
        for version in self.all_versions():
            with contextlib.suppress(LocalError):
                yield self.manifest(version)


def _is_version(name: str) -> bool:
    return name.isascii() and name.isdigit() and 8 <= len(name) <= 15
