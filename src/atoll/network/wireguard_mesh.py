"""Which way WireGuard is to send to each peer: pure decisions, from what is known of the peers and who answers.

A peer has *candidates*: the endpoints at which it may be reached, best first, and last the hub's relay. They are tried
one after another until the peer answers a ping inside the VPN; when it stops answering they are tried again. WireGuard
itself follows a peer that answers from somewhere else, so two peers that try each other at about the same time open
their NATs for each other, and it does no harm if one of them is at the relay already. From the relay the direct ways
are tried again a few times, closer together than NATs forget; then only when there are other candidates.
"""

from __future__ import annotations

import ipaddress
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.network.wireguard import Change, Seen
from atoll.network.wireguard_keys import KEY_BYTES, address_of, usable_endpoint

Endpoint = tuple[str, int]

TRY_S = 3.0
"""A candidate has so long to answer: a handshake and a ping, two round trips."""
MOST_TRY_S = 4 * TRY_S
"""So long while something comes from the peer: it may be setting up what we would tear down."""
LOST_S = 12.0
"""Without an answer for so long the way to a peer is no way any more."""
AGAIN_S = 20.0
"""Between two tries of direct ways while the relay serves: NATs keep a hole open for 30 s."""
TRIES_AGAIN = 4


@dataclass(frozen=True, slots=True)
class Listed:
    """A peer as the coordinator lists it. `ping_port` 0: it answers no pings yet; `relay_port` 0: it relays nothing."""

    name: str
    public: bytes
    port: int
    ping_port: int
    relay_port: int
    endpoints: tuple[str, ...]


@dataclass(slots=True)
class Peer:
    """One peer, and the way to it. `moved_s` is when its candidate was set, for `try_s`; `heard_s` when WireGuard last
    had anything from it, `ponged_s` when the newest question was asked that it answered (-inf: never), `way` how it
    answers: "" (not), "direct" or "hub"."""

    listed: Listed
    address: str
    direct: tuple[Endpoint, ...]
    relay: Endpoint | None = None
    at: int = 0
    moved_s: float = 0.0
    try_s: float = TRY_S
    heard_s: float = float("-inf")
    ponged_s: float = float("-inf")
    rtt_s: float = 0.0
    way: str = ""
    tries_again: int = 0
    seen: Seen | None = None

    @property
    def candidates(self) -> tuple[Endpoint, ...]:
        return (*self.direct, self.relay) if self.relay is not None else self.direct

    def answers(self, now_s: float) -> bool:
        """Whether it did so lately."""
        return now_s - self.ponged_s <= LOST_S


@dataclass(slots=True)
class Mesh:
    """All peers but this one (`own` is its public key), by public key."""

    own: bytes
    network: ipaddress.IPv6Network
    peers: dict[bytes, Peer] = field(default_factory=dict)
    hub: str = ""
    """Its name; this peer's own if it is the hub."""
    draw: Callable[[], float] = random.random
    """From 0 to 1: two peers that begin anew at the same pace would tear down each other's beginnings for ever."""
    refused: dict[str, str] = field(default_factory=dict)
    """Peers that are listed, and why they are none of the mesh."""

    def learn(self, listed: Sequence[Listed], hub: str, settled: bool, now_s: float) -> list[Change]:
        """Take in who is there. Until `settled`, who is missing may only not have come back to the coordinator."""
        changes = []
        self.hub, self.refused = hub, {}
        taken = {address_of(self.network, self.own)}
        there = set()
        for each in listed:
            if each.public == self.own:
                continue
            ports = (each.port, each.ping_port, each.relay_port)
            if len(each.public) != KEY_BYTES or not all(0 <= port < 65536 for port in ports):
                self.refused[each.name] = "it has no WireGuard key, or a port that is none"
                continue
            address = address_of(self.network, each.public)
            if address in taken:
                self.refused[each.name] = f"its address {address} is another peer's"
                continue
            taken.add(address)
            there.add(each.public)
            changes += self._take(each, address, now_s)
        for public in [key for key in self.peers if key not in there and settled]:
            del self.peers[public]
            changes.append(Change(public, gone=True))
        return changes

    def _take(self, listed: Listed, address: str, now_s: float) -> list[Change]:
        found = (usable_endpoint(text, self.network) for text in listed.endpoints)
        direct = tuple(dict.fromkeys(endpoint for endpoint in found if endpoint is not None))
        known = self.peers.get(listed.public)
        if known is None:
            peer = Peer(listed, address, direct, moved_s=now_s, tries_again=TRIES_AGAIN)
            self.peers[listed.public] = peer
            return [Change(listed.public, address, direct[0] if direct else None)]
        came_again = known.listed.ping_port != listed.ping_port and known.listed.ping_port
        if known.direct != direct or came_again:
            known.tries_again = TRIES_AGAIN
        known.listed, known.direct = listed, direct
        known.at = min(known.at, max(0, len(known.candidates) - 1))
        return []

    def ponged(self, public: bytes, asked_s: float, rtt_s: float) -> None:
        """It answered a ping."""
        if (peer := self.peers.get(public)) is not None:
            peer.ponged_s, peer.rtt_s = max(peer.ponged_s, asked_s), rtt_s

    def look(self, seen: Mapping[bytes, Seen], now_s: float) -> None:
        """Take in what WireGuard shows of the peers; where the hub is heard from tells where its relay is."""
        for public, peer in self.peers.items():
            before, peer.seen = peer.seen, seen.get(public)
            received = peer.seen.received_bytes if peer.seen is not None else 0
            if received and (before is None or received != before.received_bytes):  # less: begun anew
                peer.heard_s = now_s

    def tick(self, now_s: float) -> list[Change]:
        """What to set now. To be asked about once a second, after `look`."""
        self._place_relays(now_s)
        changes = (self._tick_one(peer, now_s) for peer in self.peers.values())
        return [change for change in changes if change is not None]

    def _place_relays(self, now_s: float) -> None:
        """The relay is where the hub answers, at its other port; it is no way to the hub itself, nor for it."""
        hub = next((peer for peer in self.peers.values() if peer.listed.name == self.hub), None)
        seen = hub.seen if hub is not None and hub.listed.relay_port and hub.answers(now_s) else None
        relay = (seen.endpoint[0], hub.listed.relay_port) if hub and seen and seen.endpoint else None
        for peer in self.peers.values():
            if peer is hub or hub is None:
                peer.relay = None
            elif relay is not None:
                peer.relay = relay
            peer.at = min(peer.at, max(0, len(peer.candidates) - 1))

    def _tick_one(self, peer: Peer, now_s: float) -> Change | None:
        if not peer.answers(now_s):
            peer.way = ""
        if not peer.candidates:
            return None
        if peer.answers(now_s) and peer.ponged_s > peer.moved_s and peer.seen is not None:
            peer.way = "hub" if peer.relay is not None and peer.seen.endpoint == peer.relay else "direct"
            return self._try_direct(peer, now_s)
        tried_s = now_s - peer.moved_s
        if tried_s < peer.try_s or (now_s - peer.heard_s < TRY_S and tried_s < MOST_TRY_S):
            return None
        peer.try_s = TRY_S * (1 + self.draw() / 2)
        peer.at = (peer.at + 1) % len(peer.candidates)
        peer.moved_s = now_s
        return Change(
            peer.listed.public, peer.address, peer.candidates[peer.at], afresh=not peer.answers(now_s)
        )

    def _try_direct(self, peer: Peer, now_s: float) -> Change | None:
        """It answers. If it does so through the relay, a direct way may be better."""
        if peer.way == "direct":
            peer.tries_again = TRIES_AGAIN
            return None
        if not (peer.direct and peer.tries_again) or now_s - peer.moved_s < AGAIN_S:
            return None
        peer.tries_again -= 1
        peer.at = peer.tries_again % len(peer.direct)
        peer.moved_s = now_s
        return Change(peer.listed.public, peer.address, peer.direct[peer.at])
