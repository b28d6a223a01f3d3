"""Addresses as people write them: `host:port`, with brackets around an IPv6 host."""

from __future__ import annotations

from atoll.errors import ConfigError


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` as (host, port). Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ConfigError(
            f"{address!r} may be an IPv6 address, and where its port begins is not clear; write it in brackets, "
            f"for example [{host}]:{port or 7070}"
        )
    if colon and host and port.isdecimal() and 0 < int(port) < 65536:
        return host.removeprefix("[").removesuffix("]"), int(port)
    raise ConfigError(
        f"{address!r} is no coordinator address; write it as host:port, for example 127.0.0.1:7070"
    )


def join_address(host: str, port: int) -> str:
    """The opposite of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(option: str, text: str) -> tuple[str, int]:
    """Where to listen, or whom to dial, as a command was told: `host:port` or `[v6]:port`; port 0 is one. Raises
    ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{option} {text}: write it as host:port, e.g. 10.0.0.1:7070 or [::]:7070")
    return host.strip("[]"), int(port)


def split_addresses(text: str) -> tuple[str, ...]:
    """`host:port`, or several separated by commas, each once and in the order given. Raises ConfigError."""
    addresses = tuple(dict.fromkeys(each.strip() for each in text.split(",")))
    for address in addresses:
        split_address(address)
    return addresses
