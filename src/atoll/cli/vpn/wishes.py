"""What `atoll vpn up` is told and shows: where this machine is to be reached, and how it proves that it belongs."""

from __future__ import annotations

import errno
import ipaddress
import shlex
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from atoll.addresses import join_address
from atoll.errors import ConfigError, LocalError
from atoll.membership.link import Secure
from atoll.network.own_addresses import look_up

RENEW_S = 10 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the person who starts it said. `endpoints` are addresses that this machine may be reached at, the first
    `stated` of them said by that person."""

    run: str
    peer: str
    coordinators: tuple[str, ...]
    port: int
    relay_port: int
    endpoints: tuple[str, ...]
    stated: int
    hub: bool


@dataclass(slots=True)
class Credentials:
    """How this machine shows that it belongs to the run: by the token, or by a certificate, in `secure`, that `renew`
    gets another one for, and in how many seconds the next one is due. `repr` shows no token."""

    token: bytes = field(repr=False)
    secure: Secure | None = field(default=None, repr=False)
    renew: Callable[[str, Secure], Awaitable[tuple[Secure, float]]] | None = None
    due_s: float = field(default_factory=lambda: time.monotonic() + RENEW_S)

    async def renew_in_time(self, address: str) -> None:
        """Raises Unreachable or Refused."""
        if self.secure is not None and self.renew and time.monotonic() > self.due_s:
            self.secure, again_s = await self.renew(address, self.secure)
            self.due_s = time.monotonic() + again_s


def is_up(interface: str, kind: str, wishes: Wishes, address: str) -> str:
    """What to say when the interface is there. Rates and evictions go by names, so the peer has to take this one."""
    return (
        f"{interface} is up ({kind}): {wishes.peer} of {wishes.run} is {address}, UDP port {wishes.port}; join with "
        f"--set local.bind={shlex.quote(interface)} --set local.peer={shlex.quote(wishes.peer)}"
    )


def own_endpoints(towards: Sequence[str], addresses: Sequence[str], port: int) -> tuple[str, ...]:
    """Where this machine may be reached, as far as it knows: on the way to the coordinators, then at its other
    addresses; loopback and what only a link knows left out."""
    found = []
    for text in (*towards, *addresses):
        address = ipaddress.ip_address(text.partition("%")[0])
        if not (address.is_loopback or address.is_link_local or address.is_unspecified):
            found.append(join_address(str(address), port))
    return tuple(dict.fromkeys(found))


def parse_endpoint(text: str) -> str:
    """`HOST:PORT` as a person writes it, as `address:port`. Looks a name up, so it blocks, for some seconds at most.
    Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"--endpoint {text}: write it as host:port, e.g. 203.0.113.7:51820 or [2001:db8::7]:51820"
        )
    try:
        _, address = look_up(bare, int(port))[0]
    except OSError as error:
        raise ConfigError(f"--endpoint {text}: {error.strerror or error}") from None
    return join_address(str(address[0]).partition("%")[0], int(port))


def tcp_listener(port: int) -> socket.socket:
    """For measuring, on IPv4 and IPv6. Raises LocalError."""
    listener = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        listener.bind(("::", port))
    except OSError as error:
        listener.close()
        reason = "is in use" if error.errno == errno.EADDRINUSE else (error.strerror or str(error)).lower()
        raise LocalError(
            f"TCP port {port}, for measuring, {reason}; stop what has it (ss -tlpn), or choose another with --port"
        ) from None
    return listener
