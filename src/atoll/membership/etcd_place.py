"""Where a journal in etcd is: `etcd://HOST:PORT,HOST:PORT/PREFIX`."""

from __future__ import annotations

import msgspec

from atoll.addresses import split_address
from atoll.errors import ConfigError

SCHEME = "etcd://"


class EtcdPlace(msgspec.Struct, frozen=True):
    """Where in which etcd a journal is kept. `str` gives it as people write it."""

    endpoints: tuple[str, ...]
    prefix: str

    def __str__(self) -> str:
        return f"{SCHEME}{','.join(self.endpoints)}/{self.prefix}"


def parse_place(text: str, run: str) -> EtcdPlace:
    """`etcd://host:port,host:port/prefix`; without a prefix it is `atoll/RUN`. Raises ConfigError."""
    hosts, _, prefix = text.removeprefix(SCHEME).partition("/")
    endpoints = tuple(dict.fromkeys(each.strip() for each in hosts.split(",")))
    for endpoint in endpoints:
        try:
            split_address(endpoint)
        except ConfigError:
            raise ConfigError(
                f"--journal {text}: {endpoint!r} is no endpoint of etcd; "
                f"write {SCHEME}HOST:2379 or {SCHEME}HOST:2379,HOST:2379/PREFIX"
            ) from None
    return EtcdPlace(endpoints, prefix.strip("/") or f"atoll/{run}")
