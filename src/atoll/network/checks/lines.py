"""This machine's addresses, and the line that leads to the coordinator."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

import psutil

from atoll.network.checks.finding import Finding, found, warning
from atoll.network.own_addresses import interface_addresses, plain

LEAST_MTU = 1280
ETHERNET_MTU = 1500
_IP_MTU, _IPV6_MTU = 14, 24  # the socket module has no names for them


def own_addresses() -> dict[str, tuple[str, ...]]:
    """IP addresses of each interface that is up, loopback left out."""
    by_name = {
        name: tuple(text for text in texts if not plain(text).is_loopback)
        for name, texts in interface_addresses().items()
    }
    return {name: kept for name, kept in by_name.items() if kept}


def ipv6(addresses: dict[str, tuple[str, ...]]) -> Finding:
    """Whether others can be reached that have IPv6 only."""
    every = [ipaddress.ip_address(text) for texts in addresses.values() for text in texts]
    wide = [str(each) for each in every if each.version == 6 and not each.is_link_local]
    narrow = [str(each) for each in every if each.version == 4]
    details = {"addresses": addresses}
    if wide:
        both = "beside IPv4" if narrow else "and no IPv4: members without IPv6 are out of reach"
        return found("ipv6", f"{wide[0]}, {both}", details=details)
    return found("ipv6", "none: members that have IPv6 only are out of reach", details=details)


def way_mtu(host: str, port: int) -> int | None:
    """The largest packet on the way to a numeric address, as far as the kernel knows; None if it does not tell.

    Connecting a datagram socket sends nothing.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    level, option = (
        (socket.IPPROTO_IP, _IP_MTU) if family == socket.AF_INET else (socket.IPPROTO_IPV6, _IPV6_MTU)
    )
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return probe.getsockopt(level, option)
    except OSError:
        return None


def interface_mtus() -> dict[str, int]:
    """MTU of each interface that is up."""
    return {name: each.mtu for name, each in psutil.net_if_stats().items() if each.isup and name != "lo"}


def mtu(on_the_way: int | None, interfaces: dict[str, int]) -> Finding:
    """What fits into a packet. Smaller than Ethernet's is usual in tunnels; a hop that takes less still, and does not
    say so, shows as connections that are made and then stand still."""
    details = {"way": on_the_way, "interfaces": interfaces}
    if on_the_way is None:
        listed = (
            ", ".join(f"{name} {size}" for name, size in sorted(interfaces.items())) or "no interface is up"
        )
        return found("mtu", listed, details=details)
    says = f"{on_the_way} bytes on the way to the coordinator"
    if on_the_way < LEAST_MTU:
        remedy = f"set the interface's MTU to {LEAST_MTU} or more: ip link set dev NAME mtu {ETHERNET_MTU}"
        return warning("mtu", f"{says}: every hop of the internet takes {LEAST_MTU}", remedy, details=details)
    if on_the_way < ETHERNET_MTU:
        return found(
            "mtu",
            f"{says}: a tunnel, it seems",
            remedy="sysctl -w net.ipv4.tcp_mtu_probing=1 if transfers begin and then stand still",
            details=details,
        )
    return found("mtu", says, details=details)


def names(own_name: str, resolved: Sequence[str], why_not: str = "") -> Finding:
    """What this machine's name stands for: on Debian that is 127.0.1.1, and then it must not be advertised."""
    details = {"name": own_name, "addresses": list(resolved)}
    if why_not:
        return found("host name", f"{own_name} stands for no address ({why_not})", details=details)
    listed = ", ".join(resolved)
    if resolved and all(is_loopback(each) for each in resolved):
        says = f"{own_name} is {listed}, loopback: for this machine only, so never advertise the name"
        return found("host name", says, details=details)
    return found("host name", f"{own_name} is {listed}", details=details)


def is_loopback(address: str) -> bool:
    """Of a numeric address; of anything else no."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
