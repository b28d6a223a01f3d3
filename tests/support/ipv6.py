"""Whether this machine speaks IPv6."""

from __future__ import annotations

import socket


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False
