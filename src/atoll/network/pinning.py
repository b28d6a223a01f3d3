"""The first contact of a newcomer: is this the coordinator that the join line means?

The authority's certificate is public. It is fetched over a connection that believes everybody, and held against the
fingerprint from the join line; all that follows, the token's proof above all, goes over connections that believe this
authority alone. Who sits in between can hinder a newcomer, and learns nothing.
"""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Sequence
from typing import Final

from atoll.addresses import join_address
from atoll.errors import ConfigError, Refused, Unreachable
from atoll.network.authority import fingerprint_of, is_authority
from atoll.network.tls import blind_context

AUTHORITY_PATH: Final = "/v1/authority"
_MOST_BYTES: Final = 64 << 10
_PAUSE_S: Final = 0.5


def fetch_authority(
    addresses: Sequence[tuple[str, int]], fingerprint: str, *, connect_s: float = 10.0, wait_s: float = 0.0
) -> str:
    """The certificate (PEM) of the run's authority, from the first of `addresses` that has the right one. Blocks at
    most `max(connect_s, wait_s)`, and a little.

    Raises Refused if whoever answers has another authority, Unreachable if nobody answers.
    """
    deadline_s = time.monotonic() + max(connect_s, wait_s)
    while True:
        missed: list[str] = []
        strange: list[str] = []
        for index, (host, port) in enumerate(addresses):
            at = join_address(host, port)
            # A fair share for each: the first may be a machine that is gone, and says nothing for ever.
            share_s = (deadline_s - time.monotonic()) / (len(addresses) - index)
            left_s = max(0.05, min(connect_s / len(addresses), share_s))
            try:
                found = _fetch(host, port, left_s)
            except (OSError, http.client.HTTPException, ValueError, ConfigError) as error:
                missed.append(f"{at}: {_words(error)}")
                continue
            if is_authority(found, fingerprint):
                return found
            strange.append(
                f"what answers at {at} is not this run's coordinator: its authority is {fingerprint_of(found)}, the "
                f"join line says {fingerprint}; somebody may be in between, or the address is another run's"
            )
        if strange:
            raise Refused(strange[0])
        if time.monotonic() + _PAUSE_S >= deadline_s:
            shown = "; ".join(missed)
            raise Unreachable(
                f"no coordinator in {max(connect_s, wait_s):.3g} s ({shown}); check the address, start one with "
                "`atoll coordinator --new`, or start before it with --wait"
            )
        time.sleep(_PAUSE_S)


def _fetch(host: str, port: int, timeout_s: float) -> str:
    connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=blind_context())
    try:
        connection.request("GET", AUTHORITY_PATH)
        answer = connection.getresponse()
        if answer.status != 200:
            raise ValueError(f"it shows no authority (HTTP {answer.status})")
        text = answer.read(_MOST_BYTES).decode("ascii")
        fingerprint_of(text)  # ConfigError for what is no certificate
        return text
    finally:
        connection.close()


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or str(error)).lower().replace("_", " ")
        if "wrong version" in reason or "record layer" in reason:
            return "it does not speak TLS: this run's coordinator was started without an authority (--new)"
        return f"TLS: {reason}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
