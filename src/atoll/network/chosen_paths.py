"""Which of a peer's addresses to dial first, as `atoll vpn` on this machine has measured it.

The process that keeps an interface writes what it knows of its peers to `FOLDER` every second: each peer's address in
the VPN, and whether the direct path or the VPN carries more to it. Whoever dials looks here; nobody has to be told.
"""

from __future__ import annotations

import ipaddress
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

FOLDER: Final = Path("/run/atoll/vpn")
FRESH_S: Final = 30.0
"""Older ones are of a process that was killed."""


def ordered(hosts: Sequence[str], folder: Path = FOLDER) -> tuple[str, ...]:
    """A peer's addresses, the one to be preferred first: its address in the VPN before all others, or after them if the
    direct path is faster. Left out if the peer dials us directly, and that is the faster way: a link inside would only
    be a slow one beside. As they are, where no VPN knows any of them. Reads small files, if there are any."""
    uses = _uses(folder) if len(hosts) > 1 and folder.is_dir() else {}
    place = {"vpn": 0, "": 1, "direct": 2}
    kept = [(uses.get(_plain(host), ""), host) for host in hosts]
    kept = [(use, host) for use, host in kept if use != "their direct"] or kept
    return tuple(host for use, host in sorted(kept, key=lambda each: place.get(each[0], 0)))


def _uses(folder: Path) -> dict[str, str]:
    """What is to be used, "vpn", "direct" or "their direct", by address in a VPN."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            status = json.loads(path.read_text())
            if abs(time.time() - status["written_s"]) <= FRESH_S:
                answering = (peer for peer in status["peers"] if peer["path"] != "no answer")
                found |= {_plain(peer["address"]): str(peer["use"]) for peer in answering}
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it is being written, or another version's
    return found


def _plain(host: str) -> str:
    """An address in the one way to write it; a name as it is."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host
