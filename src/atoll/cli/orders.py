"""What the commands that order something have in common: ask the coordinator, say in one line what happened."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.cli.output import deliver
from atoll.config.environment import run_authority, run_token
from atoll.errors import ConfigError
from atoll.membership.operator import OperatorOrder, Reply, Request, RevokeToken

if TYPE_CHECKING:
    from atoll.membership.link import Secure


def way_to(address: str, authority: str) -> Secure | None:
    """How to reach the coordinator: by TLS, if the run's authority is known. Raises as `badge.secure_way`, and
    ConfigError for `dht:...`, which says nothing without a run's name."""
    from atoll.network.dht import SCHEME  # cryptography is slow to import

    if address.startswith(SCHEME):
        raise ConfigError(
            f"{address}: this command does not ask the DHT; give it the coordinator's own host:port, which atoll "
            "doctor shows for this address"
        )
    fingerprint = run_authority(authority)
    if not fingerprint:
        return None
    from atoll.diloco.badge import secure_way

    return secure_way(address, fingerprint)


def give(address: str, token_file: Path | None, authority: str, order: OperatorOrder | RevokeToken) -> int:
    """The coordinator's answer on stdout. Raises ConfigError if it did nothing: then the order was a mistake."""
    token = run_token(token_file)
    from atoll.membership.operator_link import give_order  # the web client is slow to import

    done = give_order(address, token, order, way_to(address, authority))
    if not done.ok:
        raise ConfigError(done.reason)
    deliver(done.reason + "\n")
    return 0


def ask(address: str, token_file: Path | None, authority: str, request: Request) -> Reply:
    """The coordinator's reply. Raises Unreachable or Refused."""
    token = run_token(token_file)
    from atoll.membership.operator_link import decided  # the web client is slow to import

    return asyncio.run(decided(address, token, request, way_to(address, authority)))
