"""`atoll evict`: send one peer away, and keep it out."""

from __future__ import annotations

import re
from typing import Annotated

from cyclopts import Parameter

from atoll.cli.options import Address, Authority, PeerName, Reason, TokenFile
from atoll.cli.orders import give
from atoll.errors import ConfigError
from atoll.membership.operator import EvictPeer

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def evict(
    address: Address,
    peer: PeerName,
    /,
    *,
    for_: Annotated[
        str,
        Parameter(
            name="--for",
            help="How long its name is refused: 90s, 10m, 2h. Default: until the run ends.",
            show_default=False,
        ),
    ] = "",
    reason: Reason = "",
    token_file: TokenFile = None,
    authority: Authority = "",
) -> int:
    """Cut one peer off at once, and refuse its name for some time. It ends with exit 5.

    An attempt that its update is in is made again without it; the others go on. A peer that is gone already can be
    evicted too, so that it does not come back. Whoever holds the run's token can still come under another name.

    Try:

        atoll evict 10.0.0.5:7070 bern --for 10m --reason "its memory is broken"

    Exit codes: 0 it is evicted; 2 usage, or no such peer; 4 cannot reach; 5 wrong token; 130/143 stopped.
    """
    return give(
        address, token_file, authority, EvictPeer(peer, reason, parse_duration(for_) if for_ else 0.0)
    )


def parse_duration(text: str, option: str = "--for") -> float:
    """`90s`, `10m`, `1.5h`, `2d` or plain seconds, above 0, as seconds. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    seconds = float(found[1]) * _UNITS_S[found[2]] if found else 0.0
    if seconds <= 0:
        raise ConfigError(f"{option} {text}: write a time above 0 as 90s, 10m, 2h or 1d")
    return seconds
