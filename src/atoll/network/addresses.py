"""Where a peer's engine listens, and the address that other peers use to reach it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.errors import ConfigError

EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where this peer's engine and its sidecar listen (port 0: any free one), and where others reach it."""

    bind: str
    port: int
    advertise: str
    sidecar_port: int = 0


def engine_address(
    coordinator: str, bind: str, port: int, advertise: str, sidecar_port: int = 0
) -> EngineAddress:
    """From what the user said ("" for nothing) and from how the coordinator, "host:port", is reached.

    Of several coordinators, separated by commas, the first counts whose name can be looked up.
    Nothing said: loopback for a coordinator on loopback, else every interface, advertising the one that leads to
    the coordinator. Looks up the coordinator's name, so it may block. Raises ConfigError.
    """
    own = _address_towards_one_of(coordinator.split(","))
    way = ipaddress.ip_address(own.partition("%")[0])
    everywhere = "0.0.0.0" if way.version == 4 else "::"
    bind = bind or (own if way.is_loopback else everywhere)
    return EngineAddress(bind, port, advertise or (own if bind in EVERYWHERE else bind), sidecar_port)


def _address_towards_one_of(addresses: Sequence[str]) -> str:
    for address in addresses[:-1]:
        with contextlib.suppress(ConfigError):
            return _address_towards(address.strip())
    return _address_towards(addresses[-1].strip())


def _address_towards(address: str) -> str:
    """This machine's address on the way to `address`. Connecting a datagram socket sends nothing."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"coordinator address {address!r}: {reason}; give host:port") from None
