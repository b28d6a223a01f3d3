"""Where a peer's engine listens, and the addresses that other peers use to reach it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from atoll.errors import ConfigError
from atoll.network.own_addresses import (
    address_towards,
    all_loopback,
    interface_addresses,
    is_loopback,
    is_number,
    numbers_of,
    plain,
    way_out,
)
from atoll.values import host_of

EVERYWHERE = ("0.0.0.0", "::")
AUTO = "auto"
MOST_HOSTS = 8
"""So many addresses of a peer are tried (native/engine/candidates.h)."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where this peer's engine and its sidecar listen (port 0: any free one; bind "": everywhere, IPv4 and IPv6), and
    where others reach it: at `advertise`, or at one of `more`.

    `found_out`: the addresses are not the user's word. `doubts` are sentences about what may not be what was meant.
    """

    bind: str
    port: int
    advertise: str
    sidecar_port: int = 0
    more: tuple[str, ...] = ()
    found_out: bool = field(default=False, compare=False)
    doubts: tuple[str, ...] = field(default=(), compare=False)

    @property
    def hosts(self) -> tuple[str, ...]:
        return (self.advertise, *self.more)


def engine_address(
    coordinator: str, bind: str, port: int, advertise: str, sidecar_port: int = 0
) -> EngineAddress:
    """From what the user said ("" or "auto" for nothing) and from how the coordinator, "host:port", is reached.

    Of several coordinators, separated by commas, the first counts whose name can be looked up. Nothing said: loopback
    for a coordinator on loopback, else every interface, advertising the address that leads to the coordinator. `bind`
    is an address or an interface; `advertise` one or several of them, or host names, separated by commas. Loopback is
    advertised to no coordinator that is elsewhere. Looks up names, so it blocks, for some seconds at most. Raises
    ConfigError.
    """
    doubts: list[str] = []
    own = _own_address(coordinator, doubts)
    near = is_loopback(own)
    said = [] if advertise.strip() in ("", AUTO) else _said(advertise, own)
    bound = _bind(bind)
    listens = bound if bind not in ("", AUTO) else own if near and all_loopback(said or [own]) else ""
    if not said and listens not in ("", *EVERYWHERE) and (near or not is_loopback(listens)):
        return EngineAddress(listens, port, listens, sidecar_port, found_out=True, doubts=tuple(doubts))
    if not said and is_loopback(listens):
        doubts.append(
            f"local.bind {bind}: the engine listens on loopback, and the coordinator {coordinator} is not there: "
            "no other peer can dial this one; leave local.bind empty, or give an address of this machine"
        )
    hosts = [host for host in said if near or not _means_loopback(host, coordinator, doubts)]
    if not hosts:
        hosts = [own]
    return EngineAddress(
        listens,
        port,
        hosts[0],
        sidecar_port,
        tuple(dict.fromkeys(hosts[1:MOST_HOSTS])),
        found_out=not said,
        doubts=tuple(doubts),
    )


def seen_from_outside(engine: EngineAddress, seen_as: str) -> EngineAddress:
    """With what the coordinator sees of this peer (`seen_as`): where nothing else was said and the port is fixed, that
    address is advertised too. A doubt is added where it is none of the advertised ones."""
    if not is_number(seen_as) or is_loopback(seen_as) or all_loopback(engine.hosts):
        return engine
    seen = str(plain(seen_as))
    known = {number for host in engine.hosts for number in _numbers(host_of(host))}
    if seen in known:
        return engine
    differs = f"the coordinator sees this peer at {seen}, and it advertises {', '.join(engine.hosts)}"
    more = engine.more
    if not engine.found_out:
        doubt = f"{differs} (local.advertise): right for a forwarded port or a VPN, else leave it empty"
    elif engine.port:
        more = (*more, seen)[: MOST_HOSTS - 1]
        doubt = (
            f"{differs}: {seen} is advertised too; behind a NAT forward port {engine.port} to here, or this peer only "
            "dials out, which is enough where the others can be reached"
        )
    else:
        doubt = (
            f"{differs}: behind a NAT this peer only dials out, which is enough where the others can be reached; "
            "to be reached give local.port and forward it to here"
        )
    return EngineAddress(
        engine.bind,
        engine.port,
        engine.advertise,
        engine.sidecar_port,
        more,
        engine.found_out,
        (*engine.doubts, doubt),
    )


def _numbers(host: str) -> tuple[str, ...]:
    found = (host,) if is_number(host) else numbers_of(host)
    return tuple(str(plain(each)) for each in found)


# ---- what the user said ------------------------------------------------------------------------------------------


def _bind(text: str) -> str:
    """An address to listen on, "" for everywhere. Raises ConfigError."""
    host = text.strip()
    if host in ("", AUTO, "*", "::", "[::]"):
        return ""
    if host in (interfaces := interface_addresses()):
        return _of_interface(host, interfaces[host], "local.bind")[0]
    host = host.removeprefix("[").removesuffix("]")
    if ":" in host and not is_number(host):
        raise ConfigError(f"local.bind {text!r} is no address of this machine; the port goes into local.port")
    return host


def _said(text: str, own: str) -> list[str]:
    """The hosts of `advertise`, each with a port of its own or without. Raises ConfigError."""
    hosts: list[str] = []
    interfaces = interface_addresses()
    for each in (part.strip() for part in text.split(",")):
        if each == AUTO:
            hosts.append(own)
        elif each in interfaces:
            hosts += _of_interface(each, interfaces[each], "local.advertise")
        elif each:
            hosts.append(_checked(each))
    if not hosts:
        raise ConfigError(f"local.advertise {text!r} names nothing; leave it empty, or give an address")
    return list(dict.fromkeys(hosts))


def _of_interface(name: str, addresses: Sequence[str], key: str) -> Sequence[str]:
    if not addresses:
        raise ConfigError(
            f"{key}: the interface {name} has no address yet; is it up? See: ip address show {name}"
        )
    return addresses


def _checked(text: str) -> str:
    host = host_of(text)
    if is_number(host):
        if plain(host).is_unspecified:
            raise ConfigError(
                f"local.advertise {text}: that is every address of this machine, and nobody can dial it; give one of "
                "them, or leave it empty"
            )
        return (
            f"[{host}]:{text.rpartition(':')[2]}"
            if text.startswith("[") and not text.endswith("]")
            else text.strip("[]")
        )
    if not re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?", host):
        raise ConfigError(
            f"local.advertise {text!r} is no address, interface or host name; write an IPv6 address as 2001:db8::1, "
            "or as [2001:db8::1]:7001 with a port of its own"
        )
    return text


def _means_loopback(host: str, coordinator: str, doubts: list[str]) -> bool:
    name = host_of(host)
    numbers = (name,) if is_number(name) else numbers_of(name)
    if not is_number(name) and not numbers:
        doubts.append(
            f"local.advertise {name}: this machine cannot look up that name, so it is not known whether others can"
        )
    if not all_loopback(numbers):
        return False
    what = name if is_number(name) else f"{name}, which is {numbers[0]} here (see /etc/hosts),"
    doubts.append(
        f"local.advertise {what} is loopback and not advertised, for the coordinator {coordinator} is elsewhere "
        "and so are other peers; leave it empty, or give an address that others can dial"
    )
    return True


# ---- the way to the coordinator ----------------------------------------------------------------------------------


def _own_address(coordinator: str, doubts: list[str]) -> str:
    """This machine's address on the way to the first coordinator that can be looked up."""
    *others, last = (each.strip() for each in coordinator.split(","))
    for address in others:
        try:
            return _address_towards(address, doubts)
        except ConfigError:
            continue
    return _address_towards(last, doubts)


def _address_towards(address: str, doubts: list[str]) -> str:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        own = address_towards(host, int(port))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"coordinator address {address!r}: {reason}; give host:port") from None
    if not is_loopback(own) or is_number(host) or host == "localhost":
        return own
    if not (out := way_out()):
        return own
    doubts.append(
        f"the coordinator {host} is loopback here (see /etc/hosts): {out} is advertised, so that peers on other "
        "machines can reach this one"
    )
    return out
