"""The DHT on the command line: `dht:HOST:PORT,...` in place of the coordinator's address, and who publishes that."""

from __future__ import annotations

from rich.console import Console

from atoll.cli.join_line import join_line, print_lines
from atoll.config.load import load
from atoll.config.schema import RunConfig
from atoll.errors import ConfigError
from atoll.network.authority import Authority
from atoll.network.dht import SCHEME, Discovery, bootstrap_of
from atoll.network.dht_publishing import Publisher, addresses_of, open_publisher
from atoll.network.dht_record import is_dialable
from atoll.network.own_addresses import interface_addresses


def coordinator_of(config: RunConfig, wait_s: float = 0.0) -> str:
    """The coordinator's addresses, separated by commas: those of `local.coordinator`, or what the DHT says, which is
    asked once. Blocks for that, at most 10 s or `wait_s`. Raises Unreachable, ConfigError, or LocalError."""
    address = config.local.coordinator
    if not address.startswith(SCHEME):
        return address
    asking = Discovery.wanted(
        address, config.run.name, config.local.authority, bootstrap=config.dht.bootstrap
    )
    assert asking is not None
    with asking:
        return asking.coordinator(address, wait_s)


def found_at(address: str, run: str, fingerprint: str) -> str:
    """`coordinator_of`, for a command that has a join line's parts and no settings."""
    given = [f"run.name={run}", f"local.coordinator={address}", f"local.authority={fingerprint}"]
    return coordinator_of(load(None, given))


def _dialable(advertise: str) -> list[str]:
    """What others can dial of it: interfaces are named by their addresses, "auto" says nothing. Raises ConfigError."""
    found: list[str] = []
    interfaces = interface_addresses()
    for said in filter(None, (each.strip() for each in advertise.split(","))):
        if said == "auto":
            continue
        found += interfaces.get(said, (said,))
    for address in addresses_of("127.0.0.1", 7070, found):
        if not is_dialable(address):
            raise ConfigError(
                f"--advertise {advertise}: {address!r} cannot be published; give a host, host:port or an interface"
            )
    return found


def publisher_of(
    config: RunConfig, authority: Authority | None, advertise: str, console: Console
) -> Publisher | None:
    """A coordinator's part in the DHT, open, as a sink of its events; None unless `dht.enabled`. `advertise` as
    `atoll coordinator` takes it, several separated by commas. Raises ConfigError for a run without an authority."""
    if not config.dht.enabled:
        return None
    if authority is None:
        raise ConfigError(
            "dht.enabled = true: peers believe only what the run's authority signed, and this run has none; make one "
            "with --new, or leave the DHT out"
        )
    publisher = open_publisher(
        authority,
        config.run.name,
        port=config.dht.port,
        bootstrap=bootstrap_of(config.dht.bootstrap),
        advertise=_dialable(advertise),
    )
    named = f"{SCHEME}HOST:{publisher.port}"
    print_lines(
        console,
        [
            f"dht: on UDP port {publisher.port}; who joins by it finds the coordinator also where it has moved to:",
            join_line(named, config.run.name, authority.fingerprint).replace("join:", "  or:", 1),
        ],
    )
    return publisher
