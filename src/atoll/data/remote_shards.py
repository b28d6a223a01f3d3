"""Prepared text that lies elsewhere (`data.origins`): a file is fetched when it is first read, verified, and kept.

The cache is bounded: what was not used for longest goes first. A fetch goes on where it broke off, and is tried again
with growing pauses until its deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from atoll.data.origins import Origin, PassingError, origin_of
from atoll.data.shard_format import MANIFEST, MAX_MANIFEST_BYTES
from atoll.errors import DataError

CACHE_BYTES: Final = 16 << 30
DEADLINE_S: Final = 300.0
PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class RemoteFolder:
    """Shards at `address`, which `origin` reaches; fetched files lie in `cache`, by their content, so that runs share
    them."""

    address: str
    origin: Origin
    cache: Path
    cache_bytes: int = CACHE_BYTES
    deadline_s: float = DEADLINE_S
    pause_s: float = PAUSE_S

    @staticmethod
    def at(address: str, cache: Path, cache_bytes: int = CACHE_BYTES) -> RemoteFolder:
        """At an http address, or in an object store. Raises ConfigError."""
        return RemoteFolder(address, origin_of(address), cache, cache_bytes)

    @property
    def name(self) -> str:
        return self.address.rstrip("/")

    def manifest(self) -> bytes:
        """Blocks for at most the deadline. Raises DataError."""
        got = bytearray()
        self._fetch(MANIFEST, got, MAX_MANIFEST_BYTES)
        return bytes(got)

    def path(self, file: str, size_bytes: int, sha256: str) -> Path:
        final = self.cache / f"{sha256}{Path(file).suffix}"
        if final.is_file() and final.stat().st_size == size_bytes:
            with contextlib.suppress(OSError):
                os.utime(final)
            return final
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            self._make_room(size_bytes)
            self._download(file, final, size_bytes, sha256)
        except OSError as error:
            raise _no_room(f"{self.name}/{file}", self.cache, error) from None
        return final

    def _download(self, file: str, final: Path, size_bytes: int, sha256: str) -> None:
        draft = final.with_name(f".{final.name}.{os.getpid()}.partial")
        try:
            with draft.open("w+b") as out:
                self._fetch(file, _Counted(out, f"{self.name}/{file}", self.cache), size_bytes)
                out.flush()
                out.seek(0)
                if hashlib.file_digest(out, "sha256").hexdigest() != sha256:
                    raise DataError(
                        f"{self.name}/{file} does not have the SHA-256 of its manifest; it was changed there, or "
                        "prepared anew: start again, or ask who keeps it"
                    )
            draft.replace(final)
        finally:
            draft.unlink(missing_ok=True)

    def _fetch(self, file: str, out: bytearray | _Counted, most: int) -> None:
        """Append the file to `out`. Raises DataError after the deadline, or at once for what will not change."""
        deadline_s = time.monotonic() + self.deadline_s
        pause_s, tries = self.pause_s, 0
        while True:
            tries += 1
            try:
                self.origin.get(file, out, most)
                return
            except PassingError as error:
                why = str(error)
            if time.monotonic() + pause_s > deadline_s:
                raise DataError(
                    f"cannot fetch {self.name}/{file}: {why}; tried {tries} times in {self.deadline_s:.0f} s"
                ) from None
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _make_room(self, size_bytes: int) -> None:
        entries = []
        for entry in self.cache.iterdir():
            if not entry.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):  # another run that makes room was faster
                    entries.append((entry.stat(), entry))
        held = sum(stat.st_size for stat, _ in entries)
        for stat, entry in sorted(entries, key=lambda each: each[0].st_mtime):
            if held + size_bytes <= self.cache_bytes:
                return
            entry.unlink(missing_ok=True)  # mapped ones live on until they are let go
            held -= stat.st_size


class _Counted:
    """A file that knows how much it got."""

    def __init__(self, file: BinaryIO, name: str, cache: Path) -> None:
        self._file, self._got, self._name, self._cache = file, 0, name, cache

    def __len__(self) -> int:
        return self._got

    def extend(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:  # of this disk, not of the origin: another attempt would not mend it
            raise _no_room(self._name, self._cache, error) from None
        self._got += len(data)


def _no_room(name: str, cache: Path, error: OSError) -> DataError:
    reason = (error.strerror or str(error)).lower()
    return DataError(f"cannot keep {name} in {cache}: {reason}; free some space or set data.cache")
