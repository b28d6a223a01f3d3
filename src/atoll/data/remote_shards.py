"""Prepared text that lies at an http address: a file is fetched when it is first read, verified, and kept.

The cache is bounded: what was not used for longest goes first. A fetch goes on where it broke off, and is tried again
with growing pauses until its deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import random
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from atoll.data.shard_format import MANIFEST, MAX_MANIFEST_BYTES
from atoll.errors import DataError

CACHE_BYTES: Final = 16 << 30
TRY_S: Final = 20.0
"""A server that sends nothing for so long is asked again."""
DEADLINE_S: Final = 300.0
PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 10.0
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RemoteFolder:
    """Shards at `address`; fetched files lie in `cache`, by their content, so that runs share them."""

    address: str
    cache: Path
    cache_bytes: int = CACHE_BYTES
    deadline_s: float = DEADLINE_S
    pause_s: float = PAUSE_S

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
            reason = (error.strerror or str(error)).lower()
            raise DataError(
                f"cannot keep {self.name}/{file} in {self.cache}: {reason}; free some space or set data.cache"
            ) from None
        return final

    def _download(self, file: str, final: Path, size_bytes: int, sha256: str) -> None:
        draft = final.with_name(f".{final.name}.{os.getpid()}.partial")
        try:
            with draft.open("w+b") as out:
                self._fetch(file, _Counted(out), size_bytes)
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
        url = f"{self.name}/{file}"
        deadline_s = time.monotonic() + self.deadline_s
        pause_s, tries = self.pause_s, 0
        while True:
            tries += 1
            try:
                _get(url, out, most)
                return
            except urllib.error.HTTPError as error:
                why = f"it answers {error.code} {error.reason}"
                if error.code < 500 and error.code not in (408, 425, 429):
                    raise DataError(f"cannot fetch {url}: {why}; is the address right?") from None
            except (OSError, http.client.HTTPException, _Short) as error:
                why = str(getattr(error, "reason", error)) or type(error).__name__
            if time.monotonic() + pause_s > deadline_s:
                raise DataError(
                    f"cannot fetch {url}: {why}; tried {tries} times in {self.deadline_s:.0f} s"
                ) from None
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _make_room(self, size_bytes: int) -> None:
        entries = [(entry.stat(), entry) for entry in self.cache.iterdir() if not entry.name.startswith(".")]
        held = sum(stat.st_size for stat, _ in entries)
        for stat, entry in sorted(entries, key=lambda each: each[0].st_mtime):
            if held + size_bytes <= self.cache_bytes:
                return
            entry.unlink(missing_ok=True)  # mapped ones live on until they are let go
            held -= stat.st_size


class _Short(Exception):
    """The server broke off."""


class _Counted:
    """A file that knows how much it got."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._got = file, 0

    def __len__(self) -> int:
        return self._got

    def extend(self, data: bytes) -> None:
        self._file.write(data)
        self._got += len(data)


def _get(url: str, out: bytearray | _Counted, most: int) -> None:
    """One request for what is not there yet."""
    got = len(out)
    request = urllib.request.Request(url, headers={"Range": f"bytes={got}-"} if got else {})
    with urllib.request.urlopen(request, timeout=TRY_S) as answer:
        skip = got if got and answer.status != 206 else 0  # one that knows no ranges begins anew
        length = answer.headers.get("Content-Length")
        promised = None if length is None else int(length) - skip + got
        if promised is not None and promised > most:
            raise DataError(f"{url} has {promised} bytes and should have at most {most}")
        while data := answer.read(_READ_BYTES):
            if skip:
                skip, data = max(0, skip - len(data)), data[skip:]
            if len(out) + len(data) > most:
                raise DataError(f"{url} has more than the {most} bytes that it should have")
            out.extend(data)
    if promised is not None and len(out) < promised:
        raise _Short(f"it broke off after {len(out)} of {promised} bytes")
