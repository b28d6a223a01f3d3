"""Where the coordinator is, for a command that is given `dht:HOST:PORT,...` in its place."""

from __future__ import annotations

from atoll.config.schema import RunConfig
from atoll.network.dht import SCHEME, Discovery


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
