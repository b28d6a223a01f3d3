"""How many connections a source may open that prove nothing. Pure: addresses and times in, decisions out.

A *source* is an IPv4 address, or an IPv6 network of 64 bits: that is what one customer of a provider has. Each has a
bucket of `BURST` connections that fills up at `PER_S` a second. One that proves itself gives its place back, so a
thousand peers behind one address come in as fast as they prove.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from typing import Final

PER_S: Final = 20.0
BURST: Final = 100.0
MOST_SOURCES: Final = 4096
"""The one that was quiet longest is forgotten first: its bucket is the fullest."""


class SourceLimit:
    """The buckets of one gate."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, address: str, now_s: float) -> bool:
        """Whether one more connection from here is let in."""
        source = source_of(address)
        left, at_s = self._buckets.pop(source, (BURST, now_s))
        left = min(BURST, left + (now_s - at_s) * PER_S)
        self._buckets[source] = (left - 1 if left >= 1 else left, now_s)
        if len(self._buckets) > MOST_SOURCES:
            self._buckets.popitem(last=False)
        return left >= 1

    def give_back(self, address: str) -> None:
        """A connection from here proved itself."""
        source = source_of(address)
        if source in self._buckets:
            left, at_s = self._buckets[source]
            self._buckets[source] = (min(BURST, left + 1), at_s)


def source_of(address: str) -> str:
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address  # no internet address: a socket of this machine
    if isinstance(ip, ipaddress.IPv4Address):
        return address
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((ip, 64), strict=False).network_address)
