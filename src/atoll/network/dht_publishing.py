"""The coordinator's side of the DHT: whenever it begins to lead, it signs where it is, and publishes that."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from atoll import log
from atoll.addresses import join_address, split_address
from atoll.events import CoordinatorListening, Event
from atoll.network.addresses import EVERYWHERE
from atoll.network.authority import Authority
from atoll.network.dht import Discovery
from atoll.network.dht_record import MAX_ADDRESSES, sign
from atoll.network.own_addresses import interface_addresses, plain

_log = log.get(__name__)


class Publisher:
    """A sink of the coordinator's events, on its thread; nothing but `close` blocks."""

    def __init__(self, discovery: Discovery, authority: Authority, advertise: Sequence[str]) -> None:
        self._discovery, self._authority, self._advertise = discovery, authority, tuple(advertise)
        self._sequence = 0

    @property
    def port(self) -> int:
        """Where its node listens (UDP), for others to name as a bootstrap peer."""
        return self._discovery.port

    def __call__(self, wall_time_s: float, source: str, event: Event) -> None:
        if isinstance(event, CoordinatorListening):
            host, port = split_address(event.address)
            if addresses := addresses_of(host, port, self._advertise):
                self.announce(addresses, event.term)
            else:
                _log.warning(
                    "this machine has no address but loopback: the DHT is told nothing; give --advertise"
                )

    def announce(self, addresses: Sequence[str], term: int) -> None:
        """Say where the coordinator of this term is from now on. Raises ConfigError for what nobody could dial."""
        run, sequence = self._discovery.run, self._sequence
        self._discovery.publish(
            sign(self._authority, run=run, addresses=addresses, term=term, sequence=sequence)
        )
        self._sequence += 1

    def close(self) -> None:
        """Leave the DHT; others keep the record. Blocks for a moment."""
        self._discovery.close()


def open_publisher(
    authority: Authority,
    run: str,
    *,
    port: int = 0,
    bootstrap: Sequence[str] = (),
    advertise: Sequence[str] = (),
    bind: str = "",
) -> Publisher:
    """Take part in the DHT, ready to publish; to be closed.

    `bootstrap` are other nodes (`host:port`), none if this is the first. `advertise` are hosts, or `host:port`, by
    which others reach the coordinator (none: from where it listens). Raises ConfigError (no extra [dht], a wrong
    address) and LocalError (port).
    """
    discovery = Discovery(run, authority.fingerprint, bootstrap=bootstrap, bind=bind, port=port)
    return Publisher(discovery.open(), authority, advertise)


def addresses_of(host: str, port: int, advertise: Sequence[str] = ()) -> tuple[str, ...]:
    """What to publish of a coordinator that listens on `host:port`: what is advertised, else that address, else (it
    listens everywhere) this machine's addresses, public ones first, without loopback."""
    hosts = advertise or ((host,) if host not in EVERYWHERE else _own_hosts(only_v4=host == "0.0.0.0"))
    return tuple(dict.fromkeys(_with_port(each, port) for each in hosts))[:MAX_ADDRESSES]


def _with_port(host: str, port: int) -> str:
    """`host` may have one already."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host if ":" in host else f"{host}:{port}"
    return join_address(str(address), port)


def _own_hosts(*, only_v4: bool) -> list[str]:
    """Public ones first."""
    own = [plain(each) for addresses in interface_addresses().values() for each in addresses]
    found = [
        each
        for each in own
        if not (each.is_loopback or each.is_link_local or (only_v4 and each.version == 6))
    ]
    return [str(each) for each in sorted(found, key=lambda each: (not each.is_global, each.version))]
