"""This machine's own addresses: of its interfaces, on the way to somewhere, and what a name means here."""

from __future__ import annotations

import contextlib
import ipaddress
import queue
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

LOOK_UP_S = 5.0
"""A name that no server knows takes its resolver half a minute; nobody waits so long for an answer."""
_OUTSIDE = ("192.0.2.1", "2001:db8::1")
"""Addresses that are nobody's: the way to them is the way out."""


def interface_addresses() -> Mapping[str, tuple[str, ...]]:
    """By interface that is up, its addresses, IPv4 first; none that only holds on its own link.

    Up as its owner has set it: `isup` also wants a carrier, which the kernel may report a second after.
    """
    up = {
        name for name, stats in psutil.net_if_stats().items() if stats.isup or "up" in stats.flags.split(",")
    }
    return {
        name: tuple(
            each.address
            for family in (socket.AF_INET, socket.AF_INET6)
            for each in addresses
            if each.family == family and "%" not in each.address
        )
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
    }


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to another. Connecting a datagram socket sends nothing. Raises OSError."""
    found = look_up(host, port)
    trouble = OSError("no address")
    for family, target in found:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError as error:  # of two families only one may lead anywhere
            trouble = error
    raise trouble


def way_out() -> str:
    """The address by which this machine reaches others; "" if it reaches nobody."""
    for host in _OUTSIDE:
        with contextlib.suppress(OSError):
            address = address_towards(host, 9)
            if not is_loopback(address):
                return address
    for addresses in interface_addresses().values():
        for address in addresses:
            if not is_loopback(address):
                return address
    return ""


def look_up(host: str, port: int = 0) -> list[tuple[int, Any]]:
    """(family, socket address) of a host, best first. Blocks for LOOK_UP_S at most; raises OSError."""
    answer: queue.Queue[list[tuple[int, Any]] | OSError] = queue.Queue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
            answer.put([(family, address) for family, _, _, _, address in found])
        except UnicodeError:
            answer.put(OSError(f"{host[:80]!r} is no host name"))
        except OSError as error:
            answer.put(error)

    threading.Thread(target=ask, name="atoll-resolve", daemon=True).start()
    try:
        found = answer.get(timeout=LOOK_UP_S)
    except queue.Empty:
        raise OSError(
            f"no name server has answered within {LOOK_UP_S:g} s (an IP address needs none)"
        ) from None
    if isinstance(found, OSError):
        raise found
    return found


def numbers_of(host: str) -> tuple[str, ...]:
    """The addresses that a host means here; empty if it means none."""
    with contextlib.suppress(OSError):
        return tuple(dict.fromkeys(str(address[0]) for _, address in look_up(host)))
    return ()


def is_number(host: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.partition("%")[0])
        return True
    return False


def is_loopback(host: str) -> bool:
    """Of an address; names are not looked up."""
    return is_number(host) and plain(host).is_loopback


def plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as a value: IPv4 is IPv4, also at a socket for both families. Raises ValueError."""
    found = ipaddress.ip_address(address.partition("%")[0])
    return getattr(found, "ipv4_mapped", None) or found


def all_loopback(hosts: Sequence[str]) -> bool:
    return bool(hosts) and all(is_loopback(host) for host in hosts)


def name_for_others() -> str:
    """What to call this machine elsewhere: its host name, unless that means nothing or loopback here: then its address
    on the way out. Blocks for LOOK_UP_S at most."""
    name = socket.gethostname()
    numbers = numbers_of(name)
    return name if numbers and not all_loopback(numbers) else way_out() or name
