"""A place on a disk: the folder that holds a run's checkpoints, shared parts and the own parts of peers.

    <place>/latest                       one JSON line: format, version, digest; of the newest that was verified here
    <place>/shared/00000120/             a snapshot (docs/checkpoint-format.md)
    <place>/peers/<peer>/00000120/       a peer's own part at that version: manifest.json, own.safetensors

All of it is written under a name `.<name>.<random>.partial` and renamed when the disk has it, so a folder with its name
is whole, or was damaged later. Peers of one machine may share a place. Versions go by (term, version): after a
roll-back the same number is made again under a higher term. Nothing here is unpickled.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from atoll.errors import LocalError
from atoll.state.manifest import MANIFEST, Manifest
from atoll.state.snapshot import open_itself, read_manifest, sync_folder, write_hashed

FORMAT: Final = 1
OWN_FILE: Final = "own.safetensors"
PARTIAL: Final = ".partial"
MAX_MANIFEST_BYTES: Final = 64 << 20

_VERSION = re.compile(r"\d{8,15}")


class Latest(msgspec.Struct, frozen=True, kw_only=True):
    """Where a reader begins."""

    format: int = FORMAT
    version: int
    digest: str


class OwnFile(msgspec.Struct, frozen=True):
    file: str
    size_bytes: int
    sha256: str


class OwnManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A peer's own part. `digest` is that of the shared state it belongs to; `state` is plain JSON, whose tensors are
    in the files. `check` is SHA-256 over the compact JSON of all of it with `check` "".
    """

    format: int = FORMAT
    run: str
    peer: str
    version: int
    digest: str
    files: tuple[OwnFile, ...]
    state: dict[str, Any]
    check: str = ""

    def sealed(self) -> OwnManifest:
        plain = msgspec.structs.replace(self, check="")
        return msgspec.structs.replace(plain, check=hashlib.sha256(msgspec.json.encode(plain)).hexdigest())


@dataclass(frozen=True, order=True, slots=True)
class Found:
    """A version that has a manifest. The order is that of the run's history."""

    term: int
    version: int
    digest: str


class CheckpointFolder:
    """One place. Any process may read it; those that write take turns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def shared(self, version: int) -> Path:
        return self.path / "shared" / f"{version:08d}"

    def own(self, peer: str, version: int) -> Path:
        return self.path / "peers" / plain_name(peer) / f"{version:08d}"

    # ---- reading -----------------------------------------------------------------------------------------------

    def versions(self) -> list[Found]:
        """The shared parts whose manifest is sound, newest first."""
        found = []
        for version in _numbers(self.path / "shared"):
            with contextlib.suppress(LocalError):
                manifest = read_manifest(self.shared(version))
                found.append(Found(manifest.term, manifest.version, manifest.digest))
        return sorted(found, reverse=True)

    def all_versions(self) -> list[int]:
        """Every folder that has a version's name, newest first, damaged ones too."""
        return sorted(_numbers(self.path / "shared"), reverse=True)

    def own_versions(self, peer: str) -> list[int]:
        return sorted(_numbers(self.path / "peers" / plain_name(peer)), reverse=True)

    def peers(self) -> list[str]:
        """Who has own parts here, by the names of their folders."""
        root = self.path / "peers"
        return sorted(entry.name for entry in root.iterdir()) if root.is_dir() else []

    def latest(self) -> Latest | None:
        """What `latest` says; None if there is none, or nobody can read it."""
        try:
            with open(self.path / "latest", "rb", opener=open_itself) as file:
                said = msgspec.json.decode(file.read(4096), type=Latest)
        except (OSError, msgspec.MsgspecError):
            return None
        return said if said.format == FORMAT else None

    def read_own(self, peer: str, version: int) -> tuple[OwnManifest, Path]:
        """An own part whose every byte was checked: its manifest, and its safetensors file. Raises LocalError."""
        return _read_own(self.own(peer, version), peer, version)

    def read_own_in(self, folder_name: str, version: int) -> tuple[OwnManifest, Path]:
        """The same by the name of the peer's folder."""
        return _read_own(self.path / "peers" / folder_name / f"{version:08d}", None, version)

    def peek_own(self, folder_name: str, version: int) -> OwnManifest | None:
        """The manifest of an own part, by the name of its peer's folder; its files are not looked at."""
        try:
            data = (self.path / "peers" / folder_name / f"{version:08d}" / MANIFEST).read_bytes()
            manifest = msgspec.json.decode(data, type=OwnManifest)
        except (OSError, msgspec.MsgspecError):
            return None
        sound = manifest.check == manifest.sealed().check
        return manifest if sound and (manifest.format, manifest.version) == (FORMAT, version) else None

    # ---- writing -------------------------------------------------------------------------------------------------

    @contextmanager
    def turn(self) -> Generator[None, None, None]:
        """Only one process writes at a time, so that a part is not written twice. The kernel gives the turn back with
        the process. Where files have no locks both write: renames decide."""
        self.path.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def sweep(self) -> None:
        """Remove what writers that died left unfinished. In one's turn."""
        for folder in (self.path, self.path / "shared", *self._peer_folders()):
            for entry in folder.glob(f".*{PARTIAL}") if folder.is_dir() else ():
                _remove(entry)

    @contextmanager
    def draft(self, final: Path) -> Generator[Path, None, None]:
        """A new folder to be filled; it gets its name if nothing was raised, else it is removed."""
        partial = final.parent / f".{final.name}.{secrets.token_hex(4)}{PARTIAL}"
        partial.mkdir(parents=True)
        try:
            yield partial
            sync_folder(partial)
            partial.rename(final)  # the commit point
            sync_folder(final.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def write_own(self, manifest: OwnManifest, parts: Iterator[memoryview], size_bytes: int) -> None:
        """Write a peer's own part, in place of one of that version. Raises OSError."""
        final = self.own(manifest.peer, manifest.version)
        self.remove_own(manifest.peer, manifest.version)
        with self.draft(final) as partial:
            with (partial / OWN_FILE).open("xb") as file:
                sha256 = write_hashed(file, parts)
            whole = msgspec.structs.replace(manifest, files=(OwnFile(OWN_FILE, size_bytes, sha256),))
            _write_synced(partial / MANIFEST, msgspec.json.encode(whole.sealed()))

    def set_latest(self, manifest: Manifest) -> None:
        """Let `latest` lead to a version that was verified here. Raises OSError."""
        partial = self.path / f".latest.{secrets.token_hex(4)}{PARTIAL}"
        line = msgspec.json.encode(Latest(version=manifest.version, digest=manifest.digest)) + b"\n"
        try:
            _write_synced(partial, line)
            partial.rename(self.path / "latest")
            sync_folder(self.path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def delete(self, version: int) -> None:
        """Remove a shared part; its manifest goes first, so that nobody takes the rest for whole."""
        _remove(self.shared(version))

    def remove_own(self, peer: str, version: int) -> None:
        """Remove one peer's own part of one version."""
        _remove(self.own(peer, version))

    def delete_own(self, versions: Sequence[int]) -> None:
        """Remove all peers' own parts at these versions."""
        for folder in self._peer_folders():
            for version in versions:
                _remove(folder / f"{version:08d}")

    def own_versions_of_all(self) -> set[int]:
        return {version for folder in self._peer_folders() for version in _numbers(folder)}

    def _peer_folders(self) -> list[Path]:
        return [self.path / "peers" / name for name in self.peers()]


def decode_own(data: bytes, peer: str | None, version: int) -> OwnManifest:
    """The manifest of an own part, checked against itself (`peer` None: of any). Raises ValueError."""
    manifest = msgspec.json.decode(data, type=OwnManifest)
    if manifest.format != FORMAT or (manifest.peer, manifest.version) != (peer or manifest.peer, version):
        raise ValueError(f"it is format {manifest.format} of {manifest.peer!r}, version {manifest.version}")
    if manifest.check != manifest.sealed().check:
        raise ValueError("its check is not that of what it says")
    if [each.file for each in manifest.files] != [OWN_FILE]:
        raise ValueError("it does not name its one file")
    return manifest


def _read_own(folder: Path, peer: str | None, version: int) -> tuple[OwnManifest, Path]:
    try:
        with open(folder / MANIFEST, "rb", opener=open_itself) as file:
            manifest = decode_own(file.read(MAX_MANIFEST_BYTES), peer, version)
        size_bytes = (folder / OWN_FILE).lstat().st_size
        if size_bytes != manifest.files[0].size_bytes:
            raise ValueError(f"{OWN_FILE} has {size_bytes} bytes and not {manifest.files[0].size_bytes}")
        with open(folder / OWN_FILE, "rb", opener=open_itself) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != manifest.files[0].sha256:
                raise ValueError(f"the SHA-256 of {OWN_FILE} is not that of its manifest")
    except (OSError, ValueError) as error:  # a MsgspecError is a ValueError
        reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
        raise LocalError(f"own part {folder} is damaged or unfinished: {reason}") from None
    return manifest, folder / OWN_FILE


def plain_name(peer: str) -> str:
    """A peer's id as the name of a folder; ids that are no plain names are told apart by a hash."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", peer):
        return peer
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", peer)[:60].lstrip("._-")
    return f"{plain or 'peer'}-{hashlib.sha256(peer.encode()).hexdigest()[:12]}"


def _numbers(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [int(name) for name in names if _VERSION.fullmatch(name)]


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        (path / MANIFEST).unlink(missing_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
