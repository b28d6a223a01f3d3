"""`atoll leave`: ask one peer to say goodbye."""

from __future__ import annotations

from atoll.cli.options import Address, Authority, PeerName, Reason, TokenFile
from atoll.cli.orders import give
from atoll.membership.operator import LeavePeer


def leave(
    address: Address,
    peer: PeerName,
    /,
    *,
    reason: Reason = "",
    token_file: TokenFile = None,
    authority: Authority = "",
) -> int:
    """Ask one peer to say goodbye at its next safe point: after its inner step, or after the round it waits in.

    It ends with exit 0; what it did since the last commit is lost, and the others go on at once. Its name stays
    free: it may be started again.

    Try:

        atoll leave 10.0.0.5:7070 bern --reason "the machine is needed elsewhere"

    Exit codes: 0 it was asked; 2 usage, or no such peer; 4 cannot reach; 5 wrong token; 130/143 stopped.
    """
    return give(address, token_file, authority, LeavePeer(peer, reason))
