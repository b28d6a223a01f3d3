"""Names of bootstrap peers to addresses, each on a short-lived thread: one hanging name server holds up nobody."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections.abc import Sequence

RESOLVE_S = 3.0
FEW_S = 0.5
MOST_ADDRESSES = 4

Place = tuple[str, int]


class Resolving:
    """For one event loop. Remembers what a name led to until it leads elsewhere."""

    def __init__(self, names: Sequence[str]) -> None:
        """Each name is `host:port`."""
        self.names = tuple(names)
        self._found: dict[str, list[Place]] = {}
        self._asked: dict[str, asyncio.Future[None]] = {}
        for name in names:
            host, _, port = name.rpartition(":")
            with contextlib.suppress(ValueError):
                bare = str(ipaddress.ip_address(host.strip("[]")))
                self._found[name] = [(bare, int(port))]
        self._fixed = set(self._found)

    async def resolve(self) -> tuple[Place, ...]:
        """Where the names lead, as far as is known: waits FEW_S for others, RESOLVE_S if none is known."""
        loop = asyncio.get_running_loop()
        for name in self.names:
            if name not in self._fixed and name not in self._asked:
                self._ask(name, loop)
        for within_s in (FEW_S, RESOLVE_S):
            if self._asked and not (within_s == RESOLVE_S and self._found):
                await asyncio.wait(list(self._asked.values()), timeout=within_s)
        places = [place for name in self.names for place in self._found.get(name, [])]
        return tuple(dict.fromkeys(places))

    def _ask(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        host, _, port = name.rpartition(":")
        answered = self._asked[name] = loop.create_future()

        def settle(places: list[Place]) -> None:
            del self._asked[name]
            if places:
                self._found[name] = places
            if not answered.done():
                answered.set_result(None)

        def look_up() -> None:
            places: list[Place] = []
            with contextlib.suppress(OSError, UnicodeError):
                infos = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)
                places = list(dict.fromkeys((str(info[4][0]), int(port)) for info in infos))[:MOST_ADDRESSES]
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, places)

        threading.Thread(target=look_up, name="atoll-dht-resolve", daemon=True).start()
