"""Single objects of a store, through obstore (extra `[cloud]`): put and read back, ranges, attempts until a deadline.

Files go straight from the disk, in parts: obstore's file objects keep references to buffers that change later.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from atoll import log
from atoll.errors import AtollError, ConfigError, DeadlineExceeded, LocalError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_T = TypeVar("_T")
_logger = log.get(__name__)

DEADLINE_S: Final = 300.0
"""For one object, all attempts together: an endpoint may be gone for some minutes."""

_PART_BYTES = 8 << 20
_CONCURRENCY = 4
_PAUSE_S, _MAX_PAUSE_S = 0.25, 10.0
_REQUEST_S = 120.0
_NO_CREDENTIALS = re.compile(
    r"/api/token|meta-data|metadata\.google|InvalidAccessKeyId|SignatureDoesNotMatch"
)
"""Where nothing names credentials, the store's client asks the machine's cloud for some."""


@dataclass(slots=True)
class Objects:
    """One prefix of one store. No thread of ours: obstore has its own. All calls block, at most `deadline_s` for each
    object.

    Raises LocalError for what another attempt would not mend (no such bucket, credentials, damage), DeadlineExceeded
    if the store does not answer.
    """

    store: ObjectStore
    address: str
    deadline_s: float = DEADLINE_S

    @staticmethod
    def at(address: str, *, deadline_s: float = DEADLINE_S) -> Objects:
        """The place at an address: s3://, gs://, az://, file://, memory://. Credentials and endpoints are those that
        the store's own tools take from the environment. Raises ConfigError."""
        try:
            from obstore.exceptions import BaseError
            from obstore.store import LocalStore, from_url
        except ImportError:
            raise ConfigError(f'{address} needs obstore: pip install "atoll-train[cloud]"') from None
        try:
            if address.startswith("file://"):
                return Objects(LocalStore(address.removeprefix("file://"), mkdir=True), address, deadline_s)
            if address.startswith("memory://"):
                return Objects(from_url(address), address, deadline_s)
            options: Any = {
                "client_options": {
                    "allow_http": True,
                    "connect_timeout": timedelta(seconds=5),
                    "timeout": timedelta(seconds=_REQUEST_S),
                },
                "retry_config": {"max_retries": 1, "retry_timeout": timedelta(seconds=min(deadline_s, 30.0))},
            }
            return Objects(from_url(address, **options), address, deadline_s)
        except (BaseError, ValueError, TypeError) as error:
            raise ConfigError(f"{address} is no address of an object store: {_line(error)}") from None

    def bring(self, path: Path, key: str, size_bytes: int, sha256: str) -> None:
        """Put a file, unless it is there, and read it back. One that arrived damaged is put once more."""
        import obstore

        if self.size(key) == size_bytes and self._sha256(key, size_bytes) == sha256:
            return
        for _ in range(2):
            self._attempt(
                f"put {key}",
                lambda: obstore.put(
                    self.store, key, path, chunk_size=_PART_BYTES, max_concurrency=_CONCURRENCY
                ),
            )
            if self.size(key) == size_bytes and self._sha256(key, size_bytes) == sha256:
                return
        raise LocalError(f"{self.address}/{key} is not what was put there, twice; `latest` is left as it was")

    def put(self, key: str, data: bytes) -> None:
        import obstore

        self._attempt(f"put {key}", lambda: obstore.put(self.store, key, data, use_multipart=False))
        if self.read(key, len(data) + 1) != data:
            raise LocalError(f"{self.address}/{key} is not what was put there; another writer?")

    def read(self, key: str, most_bytes: int) -> bytes | None:
        """A small object; None if there is none. Raises LocalError for one that is larger than it may be."""
        import obstore

        size_bytes = self.size(key)
        if size_bytes is None:
            return None
        if size_bytes > most_bytes:
            raise LocalError(f"{self.address}/{key} has {size_bytes} bytes; at most {most_bytes} are read")
        return self._attempt(f"get {key}", lambda: bytes(obstore.get(self.store, key).bytes()))

    def size(self, key: str) -> int | None:
        import obstore

        def head() -> int | None:
            try:
                return obstore.head(self.store, key)["size"]
            except FileNotFoundError:  # obstore's NotFoundError is one
                return None

        return self._attempt(f"look at {key}", head)

    def _ranges(self, key: str, size_bytes: int) -> Iterator[memoryview]:
        import obstore

        for start in range(0, size_bytes, _PART_BYTES):
            stop = min(start + _PART_BYTES, size_bytes)
            part = self._attempt(
                f"get {key}",
                lambda start=start, stop=stop: memoryview(
                    obstore.get_range(self.store, key, start=start, end=stop)
                ),
            )
            if len(part) != stop - start:
                raise LocalError(f"{self.address}/{key} ends at byte {start + len(part)} of {size_bytes}")
            yield part

    def _sha256(self, key: str, size_bytes: int) -> str:
        sha = hashlib.sha256()
        for part in self._ranges(key, size_bytes):
            sha.update(part)
        return sha.hexdigest()

    def download(self, key: str, path: Path, size_bytes: int, sha256: str) -> None:
        sha = hashlib.sha256()
        with path.open("xb") as file:
            for part in self._ranges(key, size_bytes):
                sha.update(part)
                file.write(part)
        if sha256 and sha.hexdigest() != sha256:
            raise LocalError(f"{self.address}/{key} is damaged: its SHA-256 is not that of the manifest")

    def expect_size(self, key: str, size_bytes: int | None, wanted: int) -> None:
        if size_bytes != wanted:
            has = "is not there" if size_bytes is None else f"has {size_bytes} bytes and should have {wanted}"
            raise LocalError(f"{self.address}/{key} {has}; use another version")

    def sizes(self, prefix: str) -> dict[str, int]:
        """All objects below a prefix, by what follows it. Empty folders, where a store has such, do not count."""
        import obstore

        def objects() -> list[Any]:
            return [each for page in obstore.list(self.store, prefix) for each in page]

        found = self._attempt(f"list {prefix}", objects)
        return {each["path"].removeprefix(prefix): each["size"] for each in found}

    def _attempt(self, what: str, call: Callable[[], _T]) -> _T:
        """Again and again, with pauses that double, until it works or the deadline is reached."""
        deadline_s = time.monotonic() + self.deadline_s
        pause_s = _PAUSE_S
        while True:
            try:
                return call()
            except Exception as error:  # obstore's are not all of one family
                final = self._final(error)
                if final is not None:
                    raise final from None
                left_s = deadline_s - time.monotonic()
                if left_s <= pause_s:
                    raise DeadlineExceeded(
                        f"cannot {what} at {self.address} within {self.deadline_s:g} s: {_line(error)}"
                    ) from None
                _logger.info("cannot %s at %s, will try again: %s", what, self.address, _line(error))
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _final(self, error: Exception) -> AtollError | None:
        """What another attempt would not mend, in a sentence; None for what may pass."""
        from obstore.exceptions import (
            BaseError,
            InvalidPathError,
            NotSupportedError,
            PermissionDeniedError,
            UnauthenticatedError,
        )

        if isinstance(error, AtollError):
            return error
        said = _line(error)
        if "NoSuchBucket" in str(error) or "bucket does not exist" in said:
            return LocalError(
                f"{self.address}: there is no such bucket; make it, or correct checkpoint.remote"
            )
        denied = isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError)
        if denied or _NO_CREDENTIALS.search(str(error)):
            return LocalError(
                f"{self.address}: credentials are missing or not accepted; set what the store's own tools need "
                f"(AWS_ACCESS_KEY_ID and the like): {said}"
            )
        if isinstance(error, FileNotFoundError):
            return LocalError(f"{self.address}: {said}; was it removed meanwhile?")
        if isinstance(error, InvalidPathError | NotSupportedError) or not isinstance(
            error, BaseError | OSError
        ):
            return LocalError(f"{self.address}: {said}")
        return None

    def delete(self, key: str) -> None:
        """One that is not there is no error."""
        self._attempt(f"delete {key}", lambda: _delete(self.store, key))


def _delete(store: ObjectStore, key: str) -> None:
    import obstore

    with contextlib.suppress(FileNotFoundError):
        obstore.delete(store, key)


def _line(error: BaseException) -> str:
    """The first line, short: obstore's errors go on with a dump of their insides."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:300].rstrip()
