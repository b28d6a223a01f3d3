"""The process that keeps a peer's place in the run's VPN: it announces itself, hears of the others, and sets the ways.

One event loop, no threads. Four tasks: announcing, pinging and deciding (`wireguard_mesh`), measuring (`path_rates`),
and, where packets come for it, relaying (`wireguard_relay`). If this process is killed the interface stays, and
WireGuard goes on as it is; the next `atoll vpn up` takes over, `atoll vpn down` cleans up.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from atoll.addresses import join_address
from atoll.cli.vpn.measuring import Measuring
from atoll.cli.vpn.pings import Pings
from atoll.cli.vpn.wishes import Credentials, Wishes, is_up, tcp_listener
from atoll.errors import AtollError, LocalError, Refused, Unreachable
from atoll.membership.operator import Done, VpnAnnounce, VpnMesh
from atoll.membership.operator_link import announce_vpn
from atoll.network.path_rates import RateServer
from atoll.network.wireguard import Interface
from atoll.network.wireguard_keys import KeyPair, address_of, checked_network
from atoll.network.wireguard_mesh import Listed, Mesh, Peer
from atoll.network.wireguard_relay import Relay

ANNOUNCE_S = 5.0
EAGER_S = 15.0
"""For so long after its start, or after somebody came, a peer announces itself every second."""
TICK_S = 1.0
PING_S = 3.0
GOODBYE_S = 3.0
RELAY_BUFFER_BYTES = 4 << 20


class Keeper:
    """Keeps one interface until it is asked to stop. `say` takes lines for people, `publish` the status."""

    def __init__(
        self,
        wishes: Wishes,
        interface: Interface,
        keys: KeyPair,
        credentials: Credentials,
        *,
        say: Callable[[str], None],
        publish: Callable[[dict[str, Any]], None],
    ) -> None:
        self._wishes, self._interface, self._keys = wishes, interface, keys
        self._credentials = credentials
        self._say, self._publish = say, publish
        self._relay = Relay()
        self._relay_port = self._ping_port = 0
        self._eager_until_s = 0.0
        self._said: dict[bytes, str] = {}
        self._links: dict[str, float] = {}
        self._left_out: dict[str, str] = {}
        self._trouble = self._network_trouble = ""

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. Raises Unreachable or Refused if the coordinator does not take us at the start,
        LocalError for what this machine refuses, and Refused if the run does not want us any more."""
        first = await self._first_reply(stop)
        if first is None:
            return
        try:
            network = checked_network(first.network)
        except ValueError as error:
            raise Refused(f"the coordinator's VPN is none: {error}; use its version of Atoll") from None
        self._mesh = Mesh(self._keys.public, network)
        self.address = address_of(network, self._keys.public)
        async with self._served(self.address):
            await self._keep(first, stop)
            with contextlib.suppress(AtollError, TimeoutError):
                await asyncio.wait_for(self._announce(leaving=True), GOODBYE_S)

    async def _first_reply(self, stop: asyncio.Event) -> VpnMesh | None:
        """None if `stop` came first."""
        asking, stopping = asyncio.create_task(self._announce()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((asking, stopping), return_when=asyncio.FIRST_COMPLETED)
            return _mesh_of(asking.result()) if asking.done() else None
        finally:
            asking.cancel()
            stopping.cancel()

    async def _keep(self, first: VpnMesh, stop: asyncio.Event) -> None:
        self._eager_until_s = time.monotonic() + EAGER_S
        self._take(first)
        measuring = Measuring(self._keys, self._mesh, self._links, self._say)
        self._measuring = measuring
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(each)
                for each in (self._announce_always(), self._tick_always(), measuring.measure_always())
            ]
            await stop.wait()
            for task in tasks:
                task.cancel()

    @contextlib.asynccontextmanager
    async def _served(self, address: str) -> AsyncGenerator[None]:
        """The interface, and all that listens."""
        loop = asyncio.get_running_loop()
        wishes = self._wishes
        server = RateServer(self._keys, lambda public: public in self._mesh.peers)
        async with contextlib.AsyncExitStack() as stack:
            relaying = stack.enter_context(contextlib.closing(self._open_relay()))
            listener = tcp_listener(wishes.port)
            rates = await asyncio.start_server(server.attend, sock=listener)
            stack.push_async_callback(_closed, rates)
            kind = self._interface.make(wishes.run, self._keys, wishes.port, address)
            stack.callback(self._interface.remove)
            pings, _ = await loop.create_datagram_endpoint(
                lambda: Pings(self._answered, self._told), local_addr=(address, 0)
            )
            stack.callback(pings.close)
            self._pings: Pings = pings.get_protocol()  # type: ignore[assignment]
            self._ping_port = pings.get_extra_info("sockname")[1]
            loop.add_reader(relaying, self._pass_on, relaying)
            stack.callback(loop.remove_reader, relaying)
            self._say(is_up(self._interface.name, kind, wishes, address))
            self._kind = kind
            yield

    # ---- announcing

    async def _announce_always(self) -> None:
        while True:
            eager = time.monotonic() < self._eager_until_s
            await asyncio.sleep(1.0 if eager else ANNOUNCE_S)
            try:
                self._take(_mesh_of(await self._announce()))
            except Unreachable as error:  # what stands stays
                self._complain(f"{error}; the VPN stays as it is meanwhile")
            else:
                self._complain(self._network_trouble)

    async def _announce(self, *, leaving: bool = False) -> VpnMesh | Done:
        """Of several coordinators, the first that answers and leads."""
        wishes, begun = self._wishes, self._ping_port > 0
        said = VpnAnnounce(
            run=wishes.run,
            peer=wishes.peer,
            public_key=self._keys.public,
            port=wishes.port,
            ping_port=self._ping_port,
            relay_port=self._relay_port if begun else wishes.relay_port,
            endpoints=wishes.endpoints,
            stated=wishes.stated,
            hub=wishes.hub,
            seen=self._seen() if begun else {},
            leaving=leaving,
        )
        *others, last = wishes.coordinators
        for address in others:
            with contextlib.suppress(Unreachable):
                return await self._announce_to(address, said)
        return await self._announce_to(last, said)

    async def _announce_to(self, address: str, said: VpnAnnounce) -> VpnMesh | Done:
        credentials = self._credentials
        await credentials.renew_in_time(address)
        return await announce_vpn(address, credentials.token, said, credentials.secure)

    def _seen(self) -> dict[str, str]:
        """If this is the hub: where it hears the others."""
        if self._mesh.hub != self._wishes.peer:
            return {}
        now_s = time.monotonic()
        return {
            peer.listed.name: join_address(*peer.seen.endpoint)
            for peer in self._mesh.peers.values()
            if peer.seen is not None and peer.seen.endpoint is not None and peer.answers(now_s)
        }

    def _take(self, mesh: VpnMesh) -> None:
        if mesh.network != str(self._mesh.network):  # the same name, another run
            self._network_trouble = f"the run's VPN is {mesh.network} now: end this one and start it again"
        before = set(self._mesh.peers)
        listed = [
            Listed(e.peer, e.public_key, e.port, e.ping_port, e.relay_port, e.endpoints) for e in mesh.entries
        ]
        now_s = time.monotonic()
        self._interface.set(self._mesh.learn(listed, mesh.hub, mesh.settled, now_s))
        for name, why in self._mesh.refused.items() - self._left_out.items():
            self._say(f"{name} is left out: {why}")
        self._left_out = dict(self._mesh.refused)
        if set(self._mesh.peers) - before:
            self._eager_until_s = now_s + EAGER_S
        mine = mesh.hub == self._wishes.peer
        self._relay.members([*self._mesh.peers] if mine else [])
        self._links.clear()
        self._links.update({link.target: link.bytes_per_s for link in mesh.links})

    # ---- pinging and deciding

    async def _tick_always(self) -> None:
        last_ping_s = 0.0
        while True:
            now_s = time.monotonic()
            self._mesh.look(self._interface.look(), now_s)
            changes = self._mesh.tick(now_s)
            self._interface.set(changes)
            moved = {change.public for change in changes}
            every = now_s - last_ping_s >= PING_S
            for public, peer in self._mesh.peers.items():
                if peer.listed.ping_port and (every or public in moved or not peer.answers(now_s)):
                    use = self._measuring.own_use(public)
                    self._pings.ask(public, peer.address, peer.listed.ping_port, use)
            last_ping_s = now_s if every else last_ping_s
            self._tell()
            self._publish(self._status(now_s))
            await asyncio.sleep(TICK_S)

    def _answered(self, public: bytes, seconds: float) -> None:
        self._mesh.ponged(public, time.monotonic() - seconds, seconds)

    def _told(self, address: str, path: str) -> None:
        for public, peer in self._mesh.peers.items():
            if peer.address == address:
                self._measuring.theirs[public] = path

    def _tell(self) -> None:
        """One line for each peer whose way changed."""
        for public, peer in self._mesh.peers.items():
            path = _path(peer, self._mesh.hub)
            if self._said.get(public, "no answer") != path:
                where = f" at {join_address(*peer.seen.endpoint)}" if peer.seen and peer.seen.endpoint else ""
                told = f"{path}{where}, {peer.rtt_s * 1e3:.0f} ms" if path != "no answer" else path
                self._say(f"{peer.listed.name} ({peer.address}): {told}")
                self._said[public] = path
        for public in [key for key in self._said if key not in self._mesh.peers]:
            del self._said[public]

    def _complain(self, trouble: str) -> None:
        """Once for each trouble."""
        if trouble and trouble != self._trouble:
            self._say(trouble)
        self._trouble = trouble

    def _status(self, now_s: float) -> dict[str, Any]:
        wall_s = time.time()
        mine = self._mesh.hub == self._wishes.peer
        return {
            "interface": self._interface.name,
            "kind": self._kind,
            "run": self._wishes.run,
            "peer": self._wishes.peer,
            "address": self.address,
            "port": self._wishes.port,
            "hub": self._mesh.hub,
            "relayed_bytes": self._relay.passed_bytes if mine else 0,
            "trouble": self._trouble,
            "written_s": wall_s,
            "peers": [
                {
                    "peer": peer.listed.name,
                    "address": peer.address,
                    "path": _path(peer, self._mesh.hub),
                    "endpoint": join_address(*peer.seen.endpoint) if peer.seen and peer.seen.endpoint else "",
                    "rtt_s": peer.rtt_s if peer.answers(now_s) else None,
                    "handshake_age_s": max(0.0, wall_s - peer.seen.handshake_s)
                    if peer.seen and peer.seen.handshake_s
                    else None,
                    "received_bytes": peer.seen.received_bytes if peer.seen else 0,
                    "sent_bytes": peer.seen.sent_bytes if peer.seen else 0,
                    **self._measuring.status_of(peer, now_s),
                }
                for peer in sorted(self._mesh.peers.values(), key=lambda each: each.listed.name)
            ],
        }

    # ---- relaying

    def _open_relay(self) -> socket.socket:
        """Bound from the start: who becomes the hub by itself is known only later. Raises LocalError for a hub."""
        relaying = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        relaying.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        relaying.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            relaying.setsockopt(socket.SOL_SOCKET, option, RELAY_BUFFER_BYTES)
        try:
            relaying.bind(("::", self._wishes.relay_port))
            self._relay_port = relaying.getsockname()[1]
        except OSError as error:
            if self._wishes.hub:
                relaying.close()
                raise LocalError(
                    f"UDP port {self._wishes.relay_port}, for packets between others: "
                    f"{(error.strerror or str(error)).lower()}; stop what has it, or choose another --port"
                ) from None
        return relaying

    def _pass_on(self, relaying: socket.socket) -> None:
        for _ in range(64):  # then others have their turn
            try:
                packet, source = relaying.recvfrom(65535)
            except OSError:
                return
            for target in self._relay.receive(packet, (source[0], source[1]), time.monotonic()):
                with contextlib.suppress(OSError):  # no room: as on any network, it is lost
                    relaying.sendto(packet, target)


def _mesh_of(reply: VpnMesh | Done) -> VpnMesh:
    if isinstance(reply, Done):
        raise Refused(reply.reason)
    return reply


def _path(peer: Peer, hub: str) -> str:
    return f"through {hub}" if peer.way == "hub" else peer.way or "no answer"


async def _closed(server: asyncio.Server) -> None:
    server.close()
