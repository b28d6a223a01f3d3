"""`atoll vpn up`: take part in the run's own WireGuard network."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from atoll.addresses import split_addresses
from atoll.cli.finding import found_at
from atoll.cli.options import Authority, TokenFile
from atoll.cli.vpn.records import keeping, write_status
from atoll.config.environment import for_sidecar, run_authority, run_token
from atoll.errors import ConfigError
from atoll.network.addresses import engine_address
from atoll.network.own_addresses import interface_addresses
from atoll.network.wireguard import Interface, check_able, free_port
from atoll.network.wireguard_keys import kept_key_pair
from atoll.signals import SIGNALS

if TYPE_CHECKING:
    from atoll.cli.vpn.wishes import Credentials, Wishes

InterfaceName = Annotated[str, Parameter(help="The network interface's name.")]
MOST_ENDPOINTS = 6


def up(
    address: Annotated[
        str,
        Parameter(
            help="The coordinator's host:port; or dht:HOST:PORT,HOST:PORT, to ask the DHT once where it is.",
            show_default=False,
        ),
    ],
    /,
    *,
    run: Annotated[str, Parameter(help="The run's name, as the join line gives it.")],
    peer: Annotated[
        str,
        Parameter(
            help="This machine's name in the VPN; its peer has to have it, too (local.peer): rates and evictions go "
            "by it. Default: host name.",
            show_default=False,
        ),
    ] = "",
    hub: Annotated[
        bool,
        Parameter(
            help="Pass on what others cannot send each other. For a machine that all can reach.", negative=""
        ),
    ] = False,
    interface: InterfaceName = "atoll0",
    port: Annotated[
        int,
        Parameter(help="UDP port of WireGuard, and TCP port for measuring; a hub's next UDP port relays."),
    ] = 51820,
    endpoint: Annotated[
        str,
        Parameter(
            help="host:port at which others reach this machine's --port, if its router forwards one.",
            show_default=False,
        ),
    ] = "",
    out: Annotated[
        Path | None,
        Parameter(help="Folder for private key and certificate. Default: runs/NAME.", show_default=False),
    ] = None,
    authority: Authority = "",
    token_file: TokenFile = None,
) -> int:
    """Put this machine into the run's VPN, and keep it there until Ctrl-C or `atoll vpn down`.

    Every machine of the run does the same: they find each other through the coordinator, make their own keys, and send
    directly where they can, through a hub where both are behind NAT. A hub passes on sealed packets, which it cannot
    read; without --hub, a machine that is behind no NAT does it. Then join with --set local.bind=atoll0 and
    --set local.peer=NAME, the name that this machine has in the VPN: rates and evictions go by it. Needs root,
    wireguard-tools, and WireGuard in the kernel or wireguard-go. More in docs/vpn.md.

    Try:

        sudo -E atoll vpn up 10.0.0.5:7070 --run my-run
        sudo -E atoll vpn up 10.0.0.5:7070 --run my-run --hub
        sudo -E atoll vpn up 10.0.0.5:7070 --run my-run --endpoint 203.0.113.7:51820

    Exit codes: 2 usage; 3 no root, no WireGuard, or a port or interface in use; 4 cannot reach the coordinator; 5 no or
    wrong token, or not wanted; 130/143 stopped.
    """
    check_able(interface)
    if not 0 <= port < 65535:
        raise ConfigError(f"--port {port}: choose one from 1 to 65534, or 0 for any free one")
    fingerprint = run_authority(authority)
    address = found_at(address, run, fingerprint)
    coordinators = split_addresses(address)
    token = run_token(token_file, needed=not fingerprint)
    folder = out or Path("runs") / run
    name = peer or socket.gethostname().split(".")[0]
    # the web client is slow to import
    from atoll.cli.vpn.keeper import Keeper
    from atoll.cli.vpn.wishes import Wishes, own_endpoints, parse_endpoint

    console = Console(highlight=False)
    with keeping(interface):
        stated = [parse_endpoint(endpoint)] if endpoint else []
        kept = Interface(interface, for_sidecar())
        kept.check_free()
        kept.remove()  # one that is left over has our port
        port = free_port(port)
        towards = engine_address(address, "", 0, "").advertise
        known = own_endpoints([towards], _addresses(interface), port)
        wishes = Wishes(
            run=run,
            peer=name,
            coordinators=coordinators,
            port=port,
            relay_port=port + 1,
            endpoints=tuple(dict.fromkeys([*stated, *known]))[:MOST_ENDPOINTS],
            stated=len(stated),
            hub=hub,
        )
        keeper = Keeper(
            wishes,
            kept,
            kept_key_pair(folder / "vpn" / f"{interface}.key"),
            _credentials(wishes, address, token, fingerprint, folder),
            say=lambda line: console.print(f"vpn: {line}", markup=False, soft_wrap=True),
            publish=lambda status: write_status(interface, status),
        )
        return 128 + asyncio.run(_until_stopped(keeper.run))


def _credentials(wishes: Wishes, address: str, token: bytes, fingerprint: str, folder: Path) -> Credentials:
    """A certificate for this machine's VPN where the run has an authority: it outlasts the token. Else the token."""
    from atoll.cli.vpn.wishes import Credentials

    if not fingerprint:
        return Credentials(token)
    from atoll.diloco.badge import enrol
    from atoll.membership.vpn_board import certificate_name

    badge = enrol(
        address,
        run=wishes.run,
        peer=certificate_name(wishes.peer),
        token=token,
        fingerprint=fingerprint,
        folder=folder,
    )
    return Credentials(b"", badge.secure, badge.renew)


async def _until_stopped(run: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """The signal that ended it. A second one ends the process at once; the interface then stays until `down`."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    number = 0

    def ask(signum: signal.Signals) -> None:
        nonlocal number
        number = int(signum)
        for each in SIGNALS:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        stop.set()

    for signum in SIGNALS:
        loop.add_signal_handler(signum, ask, signum)
    try:
        await run(stop)
    except BaseExceptionGroup as group:  # of its tasks; the first failure cancelled the others
        raise _first(group) from None
    return number


def _first(group: BaseExceptionGroup) -> BaseException:
    """Of a task's failure, itself."""
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def _addresses(own: str) -> list[str]:
    """Of all interfaces but our own."""
    return [each for name, addresses in interface_addresses().items() if name != own for each in addresses]
