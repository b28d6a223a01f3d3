"""What the commands that order something have in common: ask the coordinator, say in one line what happened."""

from __future__ import annotations

from pathlib import Path

from atoll.cli.output import deliver
from atoll.config.environment import run_token
from atoll.errors import ConfigError
from atoll.membership.operator import EvictPeer, LeavePeer, StopRun


def give(address: str, token_file: Path | None, order: StopRun | LeavePeer | EvictPeer) -> int:
    """The coordinator's answer on stdout. Raises ConfigError if it did nothing: then the order was a mistake."""
    token = run_token(token_file)
    from atoll.membership.operator_link import give_order  # the web client is slow to import

    done = give_order(address, token, order)
    if not done.ok:
        raise ConfigError(done.reason)
    deliver(done.reason + "\n")
    return 0
