"""The coordinator's memory: append-only records, each kept safe before anything that follows from it is sent.

`Journal` is what the server needs of one: a file (here), or keys in etcd (`etcd_journal`). In the file,
a *frame* is a mark, the length and the CRC-32 of its payload, and the payload (msgpack). The first frame says
which format and run this is. A crash can tear only the last frame: a torn tail is cut off, with a log line.
Anything else that does not fit is damage, and damage is never guessed around. The file holds the session key,
hence mode 0600.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import zlib
from pathlib import Path
from typing import Protocol

import msgspec

from atoll import log
from atoll.errors import LocalError
from atoll.membership.steps import JournalRecord

FORMAT = 1
MAX_RECORD_BYTES = 64 << 20

_MARK = b"\xa7ATJ"
_HEADER = struct.Struct("<4sII")  # mark, payload length, CRC-32 over length and payload

_log = log.get(__name__)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(JournalRecord)


class LeadLost(Exception):
    """Another coordinator may lead by now: what is not in the journal yet must not be sent any more."""


class Journal(Protocol):
    """What one coordinator wrote and its successors read. Calls block; nothing may overtake them."""

    records: tuple[JournalRecord, ...]
    """What it held when it was opened."""

    def hold(self) -> None:
        """Make sure that this process may still act, and keep it so. Raises LeadLost if it may not."""
        ...

    def append(self, record: JournalRecord) -> None:
        """Keep one record; it is safe when this returns. Raises LeadLost or LocalError."""
        ...

    def close(self) -> None: ...


class JournalHead(msgspec.Struct, frozen=True):
    """What stands before the records."""

    format: int
    run: str


_head_decoder = msgspec.msgpack.Decoder(JournalHead)


class JournalFile:
    """One open journal, locked against every other process. `records` is what it held when it was opened.

    Raises LocalError, naming the file, if it cannot be opened, is in use, damaged, or belongs to another run.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._path = path
        self._fd = _open_locked(path)
        try:
            self.records = self._load(run)
        except BaseException:
            os.close(self._fd)
            raise

    def hold(self) -> None:
        """The lock holds for as long as the process lives."""

    def append(self, record: JournalRecord) -> None:
        """Write one record and wait until the disk has it. On LocalError the file holds no part of it."""
        self._write(_frame(_encoder.encode(record)))

    def close(self) -> None:
        """Give up the lock. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _load(self, run: str) -> tuple[JournalRecord, ...]:
        data = _read_all(self._fd)
        payloads, self._size = self._split(data)
        if self._size < len(data):
            lost = len(data) - self._size
            _log.warning(
                "journal %s: dropped a torn record of %d bytes at offset %d", self._path, lost, self._size
            )
            os.ftruncate(self._fd, self._size)
            os.fsync(self._fd)
        if not payloads:
            self._write(_frame(_encoder.encode(JournalHead(FORMAT, run))))
            _sync_folder(self._path.parent)
            return ()
        self._check_head(payloads[0][1], run)
        return tuple(self._decode(offset, payload) for offset, payload in payloads[1:])

    def _split(self, data: bytes) -> tuple[list[tuple[int, bytes]], int]:
        """All whole frames as (offset, payload), and where they end. Raises LocalError for damage."""
        payloads: list[tuple[int, bytes]] = []
        offset = 0
        while offset < len(data):
            payload = _payload_at(data, offset)
            if payload is None:
                if not _is_torn_tail(data, offset):
                    raise self._damaged(offset, "the record does not match its checksum")
                break
            payloads.append((offset, payload))
            offset += _HEADER.size + len(payload)
        return payloads, offset

    def _check_head(self, payload: bytes, run: str) -> None:
        try:
            head = _head_decoder.decode(payload)
        except msgspec.MsgspecError:
            raise self._damaged(0, "the first record names no run") from None
        if head.format != FORMAT:
            raise LocalError(
                f"journal {self._path} has format {head.format}, this version reads {FORMAT}; "
                "use the version of Atoll that wrote it, or name another file with --journal"
            )
        if head.run != run:
            raise LocalError(
                f"journal {self._path} belongs to run {head.run!r}, not {run!r}; "
                "name another file with --journal"
            )

    def _decode(self, offset: int, payload: bytes) -> JournalRecord:
        try:
            return _decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise self._damaged(offset, str(error)) from None

    def _damaged(self, offset: int, why: str) -> LocalError:
        return LocalError(
            f"journal {self._path} is damaged at offset {offset} ({why}); restore the file from a copy, "
            "or move it away to begin a new run"
        )

    def _write(self, frame: bytes) -> None:
        try:
            _write_all(self._fd, frame, self._size)
            os.fsync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, self._size)
            raise LocalError(
                f"cannot write to journal {self._path} ({error.strerror}); "
                "make room or name another file with --journal, then start the coordinator again"
            ) from error
        self._size += len(frame)


def _open_locked(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LocalError(
            f"cannot open journal {path} ({error.strerror}); name another file with --journal"
        ) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise LocalError(f"journal {path} is no regular file; name another file with --journal")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(fd, 0o600)
    except BlockingIOError as error:
        os.close(fd)
        raise LocalError(
            f"journal {path} is in use by another coordinator; stop that one, "
            "or name another file with --journal"
        ) from error
    except OSError as error:
        os.close(fd)
        raise LocalError(
            f"cannot lock journal {path} ({error.strerror}); name a file on a local disk with --journal"
        ) from error
    return fd


def _frame(payload: bytes) -> bytes:
    length = struct.pack("<I", len(payload))
    return _HEADER.pack(_MARK, len(payload), zlib.crc32(payload, zlib.crc32(length))) + payload


def _payload_at(data: bytes, offset: int) -> bytes | None:
    """The payload of the whole and sound frame at `offset`, or None."""
    if len(data) - offset < _HEADER.size:
        return None
    mark, length, crc = _HEADER.unpack_from(data, offset)
    start = offset + _HEADER.size
    if mark != _MARK or length > MAX_RECORD_BYTES or start + length > len(data):
        return None
    payload = data[start : start + length]
    return payload if zlib.crc32(payload, zlib.crc32(struct.pack("<I", length))) == crc else None


def _is_torn_tail(data: bytes, offset: int) -> bool:
    """Whether no sound frame follows: each was synced before the next, so a crash tears only the last."""
    following = data.find(_MARK, offset + 1)
    while following >= 0:
        if _payload_at(data, following) is not None:
            return False
        following = data.find(_MARK, following + 1)
    return True


def _read_all(fd: int) -> bytes:
    with open(fd, "rb", closefd=False) as file:
        return file.read()


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
