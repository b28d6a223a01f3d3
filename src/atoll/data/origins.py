"""Where fetched shards come from: an http server, or an object store through obstore (extra `[cloud]`).

An origin makes one attempt: it appends what is not there yet, and says whether another attempt may help. Attempts,
pauses, the cache and the check of what came are `data.remote_shards`' affair, the same for all.
"""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from atoll.errors import ConfigError, DataError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

TRY_S: Final = 20.0
"""A server that sends nothing for so long is asked again."""
HTTP: Final = ("http://", "https://")
STORES: Final = ("s3://", "gs://", "az://", "file://")

_READ_BYTES = 1 << 20
_PART_BYTES, _PART_S = 4 << 20, 60.0
"""Stores are asked for parts, so that a store that is slow can be told from one that sends nothing."""
_NO_CREDENTIALS = re.compile(
    r"/api/token|meta-data|metadata\.google|InvalidAccessKeyId|SignatureDoesNotMatch"
)
"""Where nothing names credentials, the store's client asks the machine's cloud for some."""


class PassingError(Exception):
    """This attempt failed; another one may not. The text says why."""


class Out(Protocol):
    """What a file is appended to; `len` is how much came."""

    def __len__(self) -> int: ...
    def extend(self, data: bytes, /) -> None: ...


class Origin(Protocol):
    def get(self, file: str, out: Out, most: int) -> None:
        """One attempt to get what `out` lacks of a file of at most `most` bytes. Raises PassingError, or DataError for
        what will not change."""
        ...


def origin_of(address: str) -> Origin:
    """Raises ConfigError for an address of nothing, or if obstore is needed and not installed, DataError for a folder
    that is not there."""
    if address.startswith(HTTP):
        return HttpOrigin(address)
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, from_url
    except ImportError:
        raise ConfigError(f'{address} needs obstore: pip install "atoll-train[cloud]"') from None
    try:
        if address.startswith("file://"):
            folder = Path(address.removeprefix("file://"))
            if not folder.is_absolute():
                raise ValueError("a path in it begins with /, as in file:///data/books")
            if not folder.is_dir():
                raise DataError(f"cannot fetch {address}: there is no such folder; is the address right?")
            return StoreOrigin(LocalStore(folder), address)
        # Attempts are ours: obstore's own would not be told, nor bounded by the deadline.
        options: Any = {
            "client_options": {
                "allow_http": True,
                "connect_timeout": timedelta(seconds=5),
                "timeout": timedelta(seconds=_PART_S),
            },
            "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=TRY_S)},
        }
        return StoreOrigin(from_url(address, **options), address)
    except (BaseError, ValueError, TypeError, OSError) as error:
        raise ConfigError(f"data.shards: {address} is no place of an object store: {_line(error)}") from None


@dataclass(frozen=True, slots=True)
class HttpOrigin:
    """Any static server; one that knows no ranges is read from the start again."""

    address: str

    def get(self, file: str, out: Out, most: int) -> None:
        url = f"{self.address.rstrip('/')}/{file}"
        got = len(out)
        request = urllib.request.Request(url, headers={"Range": f"bytes={got}-"} if got else {})
        promised: int | None = None
        try:
            with urllib.request.urlopen(request, timeout=TRY_S) as answer:
                skip = got if got and answer.status != 206 else 0  # one that knows no ranges begins anew
                length = answer.headers.get("Content-Length")
                promised = None if length is None else int(length) - skip + got
                _expect(url, promised, most)
                while data := answer.read(_READ_BYTES):
                    if skip:
                        skip, data = max(0, skip - len(data)), data[skip:]
                    _append(url, out, data, most)
        except urllib.error.HTTPError as error:
            why = f"it answers {error.code} {error.reason}"
            if error.code < 500 and error.code not in (408, 425, 429):
                raise DataError(f"cannot fetch {url}: {why}; is the address right?") from None
            raise PassingError(why) from None
        except (OSError, http.client.HTTPException) as error:
            raise PassingError(str(getattr(error, "reason", error)) or type(error).__name__) from None
        if promised is not None and len(out) < promised:
            raise PassingError(f"it broke off after {len(out)} of {promised} bytes")


@dataclass(frozen=True, slots=True)
class StoreOrigin:
    """A prefix of an object store. Credentials and endpoints are those of the store's own tools, from the
    environment. No thread of ours: obstore has its own."""

    store: ObjectStore
    address: str

    def get(self, file: str, out: Out, most: int) -> None:
        import obstore

        name = f"{self.address.rstrip('/')}/{file}"
        size_bytes = most
        try:
            while len(out) < size_bytes:
                part = (len(out), min(len(out) + _PART_BYTES, size_bytes))
                answer = obstore.get(self.store, file, options={"range": part})
                size_bytes = answer.meta["size"]
                _expect(name, size_bytes, most)
                data = bytes(answer.bytes())
                if not data:
                    raise PassingError(f"it broke off after {len(out)} of {size_bytes} bytes")
                _append(name, out, data, most)
        except (DataError, PassingError):
            raise
        except Exception as error:  # obstore's are not all of one family
            if (why := _final(name, error)) is not None:
                raise DataError(why) from None
            raise PassingError(_line(error)) from None


def _final(name: str, error: Exception) -> str | None:
    """What another attempt would not mend, in a sentence; None for what may pass."""
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    said = str(error)
    if "NoSuchBucket" in said or "bucket does not exist" in said:
        return f"cannot fetch {name}: there is no such bucket; is the address right?"
    if isinstance(
        error, PermissionDeniedError | UnauthenticatedError | PermissionError
    ) or _NO_CREDENTIALS.search(said):
        return (
            f"cannot fetch {name}: credentials are missing or not accepted; set what the store's own tools need "
            f"(AWS_ACCESS_KEY_ID and the like): {_line(error)}"
        )
    if isinstance(error, FileNotFoundError):  # obstore's NotFoundError is one
        return f"cannot fetch {name}: it is not there; is the address right?"
    return None if isinstance(error, BaseError | OSError) else f"cannot fetch {name}: {_line(error)}"


def _expect(name: str, promised: int | None, most: int) -> None:
    if promised is not None and promised > most:
        raise DataError(f"{name} has {promised} bytes and should have at most {most}")


def _append(name: str, out: Out, data: bytes, most: int) -> None:
    if len(out) + len(data) > most:
        raise DataError(f"{name} has more than the {most} bytes that it should have")
    out.extend(data)


def _line(error: BaseException) -> str:
    """The first line, short: obstore's errors go on with a dump of their insides."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:300].rstrip()
