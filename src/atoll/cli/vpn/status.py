"""`atoll vpn status`: how this machine's VPN stands."""

from __future__ import annotations

import json as json_
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from atoll.cli.output import deliver
from atoll.cli.vpn.records import keeper, read_status
from atoll.cli.vpn.up import InterfaceName
from atoll.errors import ConfigError


def status(
    *,
    interface: InterfaceName = "atoll0",
    json: Annotated[
        bool, Parameter(help="Print one JSON object on stdout, and nothing else.", negative="")
    ] = False,
) -> int:
    """Show the VPN's peers: how each is reached, what the direct path and the VPN carry, and which is the faster.

    Rates are what this machine can send, measured when a way is new, every half hour, and when the engine's rate to
    that peer drops. Needs no root.

    Try:

        atoll vpn status
        atoll vpn status --json

    The fields of --json are listed in docs/vpn.md.

    Exit codes: 0 it is up; 2 it is not; 130/143 stopped.
    """
    pid, found = keeper(interface), read_status(interface)
    if not pid or found is None:
        raise ConfigError(
            f"no atoll vpn is up on {interface}; start one with: sudo -E atoll vpn up ADDRESS --run NAME"
        )
    if json:
        deliver(json_.dumps({**found, "pid": pid}) + "\n")
        return 0
    hub = f"the hub is {found['hub']}" if found["hub"] else "there is no hub"
    console = Console(highlight=False)
    console.print(
        f"{interface} ({found['kind']}): {found['peer']} of {found['run']} is {found['address']}; {hub}",
        markup=False,
        soft_wrap=True,
    )
    if found["trouble"]:
        console.print(found["trouble"], markup=False, soft_wrap=True)
    for each in found["peers"]:
        for line in _lines(each):
            console.print(line, markup=False, soft_wrap=True)
    return 0


def _lines(peer: dict[str, Any]) -> tuple[str, str]:
    where = f" at {peer['endpoint']}" if peer["endpoint"] else ""
    rtt = "" if peer["rtt_s"] is None else f", {peer['rtt_s'] * 1e3:.0f} ms"
    age_s = peer["handshake_age_s"]
    handshake = "no handshake yet" if age_s is None else f"handshake {age_s:.0f} s ago"
    moved = f"in {peer['received_bytes'] / 1e6:.1f} MB, out {peer['sent_bytes'] / 1e6:.1f} MB"
    rates = f"direct {_rate(peer['direct_bytes_per_s'])}, VPN {_rate(peer['vpn_bytes_per_s'])}"
    return (
        f"{peer['peer']}: {peer['path']}{where}{rtt}, {handshake}, {moved}",
        f"    {peer['address']}; {rates}: use {peer['use']} ({peer['why']})",
    )


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{bytes_per_s * 8e-6:.0f} Mbit/s"
