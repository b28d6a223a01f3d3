"""Whether others reach this machine, and what stands between: from what the coordinator saw and tried. Pure.

A pair of peers needs one that can be dialled, so a machine that can only dial out takes part. It is a problem where
somebody meant it to be reached: it has an address of its own there, or was given a port.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.network.checks.finding import Finding, found, problem, warning
from atoll.network.checks.lines import is_loopback

Source = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """`own_host` is this machine's address on the way to the coordinator, `seen_host` what that sees as the source.
    `port` is the listener's, `port_given` if the user chose it. `dialed` are the ports that the coordinator tried, and
    why in vain ("" if not in vain); `mapped` the sources of connections from `port` to two ports of it; () if unknown.
    """

    own_host: str
    seen_host: str
    port: int
    port_given: bool
    dialed: dict[int, str]
    mapped: Sequence[Source] = ()

    @property
    def is_translated(self) -> bool:
        return self.own_host != self.seen_host

    def kind(self) -> str:
        """none, firewall, forwarded, cone, endpoint-independent, endpoint-dependent, or translated."""
        reached = {port for port, why in self.dialed.items() if not why}
        if not self.is_translated:
            return "none" if self.port in reached else "firewall"
        if self.port in reached:
            return "forwarded"
        if reached:
            return "cone"
        if not self.mapped:
            return "translated"
        return "endpoint-independent" if len(set(self.mapped)) == 1 else "endpoint-dependent"


_KINDS = {
    "none": "no address translation: {own} is seen as itself",
    "firewall": "no address translation: {own} is seen as itself",
    "forwarded": "{own} is seen as {seen}: translated, with port {port} forwarded",
    "cone": "{own} is seen as {seen}: translated, and reached where it was seen (a cone)",
    "endpoint-independent": "{own} is seen as {seen}: translated, one port for all (endpoint-independent), "
    "and shut from outside",
    "endpoint-dependent": "{own} is seen as {seen}: translated, another port for each destination (symmetric)",
    "translated": "{own} is seen as {seen}: translated",
}


def nat(seen: Seen) -> Finding:
    """What kind of translation is on the way, as the coordinator sees it."""
    says = _KINDS[seen.kind()].format(own=seen.own_host, seen=seen.seen_host, port=seen.port)
    details = {"kind": seen.kind(), "own": seen.own_host, "seen": seen.seen_host, "mapped": list(seen.mapped)}
    return found("nat", says, details=details)


def port_in(seen: Seen) -> Finding:
    """Whether the coordinator reached the listener, and where."""
    kind, port = seen.kind(), seen.port
    why = seen.dialed.get(port, "not tried")
    details: dict[str, Any] = {"kind": kind, "port": port, "dialed": seen.dialed}
    if kind in ("none", "forwarded"):
        chosen = "" if seen.port_given else ", a free one"
        says = f"the coordinator reached port {port}{chosen}, at {seen.seen_host}"
        return found("ports in", says, about="in", details=details)
    if kind == "firewall":
        return problem(
            "ports in",
            f"the coordinator cannot reach port {port} at {seen.seen_host} ({why}): a firewall shuts it",
            f"open {_port_text(seen)} there, e.g. nft add rule inet filter input tcp dport "
            f"{port if seen.port_given else 'PORT'} accept",
            about="in",
            details=details,
        )
    if kind == "cone":
        reached = next(each for each, reason in seen.dialed.items() if not reason)
        return found(
            "ports in",
            f"the coordinator reached it at {seen.seen_host}:{reached}, where it was seen",
            about="in",
            details=details,
        )
    judge = problem if seen.port_given else warning
    return judge(
        "ports in",
        f"the coordinator cannot reach port {port} at {seen.seen_host} ({why}): this peer can only dial out, "
        "and has no link to another such",
        f"forward {_port_text(seen)} on the router, and set local.advertise={seen.seen_host}; or atoll vpn",
        about="in",
        details=details,
    )


def not_tried(bind: str, own_host: str) -> Finding:
    """Of a listener at another address of this machine than the coordinator's connection has: it dials that alone."""
    says = f"not tried: this peer listens at {bind} alone, and the coordinator dials only {own_host}"
    return found("ports in", says, about="in", details={"kind": "", "bind": bind, "own": own_host})


def _port_text(seen: Seen) -> str:
    return f"TCP port {seen.port}" if seen.port_given else "a TCP port (named by --set local.port=PORT)"


def advertised(
    address: str,
    resolved: Sequence[str],
    why_not: str,
    *,
    coordinator_host: str,
    seen: Seen,
    own: Collection[str],
) -> Finding:
    """Whether the address that others are told is one that they can use. `resolved` are the numeric addresses it stands
    for, `why_not` why it stands for none; `own` are those that this machine's interfaces have."""
    details = {"address": address, "resolved": list(resolved)}
    if why_not:
        return problem(
            "advertised",
            f"others are told {address}, which is no address here ({why_not})",
            f"set local.advertise={seen.seen_host}",
            about="in",
            details=details,
        )
    loops = [each for each in resolved if is_loopback(each)]
    shown = address if address in resolved else f"{address} ({', '.join(resolved)})"
    if loops and not is_loopback(coordinator_host):
        return problem(
            "advertised",
            f"others are told {shown}, which is loopback: each of them would reach itself",
            f"set local.advertise={seen.seen_host}",
            about="in",
            details=details,
        )
    if seen.is_translated and seen.seen_host not in resolved and seen.kind() in ("forwarded", "cone"):
        return problem(
            "advertised",
            f"others are told {shown}, and see {seen.seen_host}",
            f"set local.advertise={seen.seen_host}",
            about="in",
            details=details,
        )
    if not loops and not {*own, seen.seen_host, seen.own_host} & {*resolved}:
        return warning(
            "advertised",
            f"others are told {shown}: no interface here has that address, and the coordinator sees {seen.seen_host}",
            f"set local.advertise={seen.seen_host}, unless {address} leads here by a way of its own",
            about="in",
            details=details,
        )
    return found("advertised", f"others are told {shown}", about="in", details=details)
