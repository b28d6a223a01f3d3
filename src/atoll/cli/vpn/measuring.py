"""Measures, one peer after another, what the direct path and the VPN carry, and says which is to be used."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from atoll.network.path_rates import BusyError, Choice, choose, measure, order, worth_measuring
from atoll.network.wireguard_keys import KeyPair
from atoll.network.wireguard_mesh import Mesh, Peer

LOOK_S = 1.0
SETTLED_S = 4.0
"""A way is measured once it has stood for so long."""


class Measuring:
    """`links` is what the engine's links carried lately, by peer, in bytes per second; kept by someone else."""

    def __init__(
        self, keys: KeyPair, mesh: Mesh, links: Mapping[str, float], say: Callable[[str], None]
    ) -> None:
        self._keys, self._mesh, self._links, self._say = keys, mesh, links, say
        self._choices: dict[bytes, Choice] = {}
        self._ways: dict[bytes, tuple[str, float]] = {}
        self._reasons: dict[bytes, str] = {}
        self.theirs: dict[bytes, str] = {}
        """Which path each peer says that it uses to us."""

    async def measure_always(self) -> None:
        """One after another, whenever there is a reason to. Does not end."""
        while True:
            await asyncio.sleep(LOOK_S * random.uniform(0.5, 1.5))  # so that two do not always meet
            for public, peer in list(self._mesh.peers.items()):
                now_s = time.monotonic()
                if reason := self._reason(public, peer, now_s):
                    try:
                        await self._measure(public, peer, reason)
                    except BusyError:
                        continue

    def _reason(self, public: bytes, peer: Peer, now_s: float) -> str:
        way, since_s = self._ways.get(public, ("", now_s))
        if way != peer.way:
            self._ways[public] = (peer.way, now_s)
            if public in self._choices:
                self._reasons[public] = f"its way changed from {way or 'none'} to {peer.way or 'none'}"
            return ""
        if not way:
            return ""
        if now_s - since_s < SETTLED_S:
            return ""
        reason, held = worth_measuring(
            self._choices.get(public), self._links.get(peer.listed.name, 0.0), now_s
        )
        if held is not None:
            self._choices[public] = held
        return self._reasons.get(public, "") or reason

    async def _measure(self, public: bytes, peer: Peer, reason: str) -> None:
        direct_rate = 0.0
        for host in _direct_hosts(peer):
            direct_rate, _ = await measure(self._keys, public, host, peer.listed.port)
            if direct_rate:
                break
        vpn_rate, _ = await measure(self._keys, public, peer.address, peer.listed.port)
        held = self._choices.get(public)
        chosen = choose(direct_rate, vpn_rate, time.monotonic(), held)
        self._choices[public] = chosen
        self._reasons.pop(public, None)
        if held is None or held.path != chosen.path:
            self._say(f"{peer.listed.name}: use the {chosen.path} path, {chosen.reason} ({reason})")

    def own_use(self, public: bytes) -> str:
        """The path that we use to a peer, "vpn" or "direct"."""
        choice = self._choices.get(public)
        return choice.path if choice else "vpn"

    def status_of(self, peer: Peer, now_s: float) -> dict[str, Any]:
        """For people and scripts: rates in bytes per second, None where nothing was reached or measured."""
        choice = self._choices.get(peer.listed.public)
        hosts, use = _direct_hosts(peer), self.own_use(peer.listed.public)
        # Behind a NAT it can dial us directly, and we cannot dial it: then its links are the fast ones, and enough.
        called = use == "vpn" and self.theirs.get(peer.listed.public) == "direct" and not _reaches(choice)
        return {
            "direct_bytes_per_s": (choice.direct_rate or None) if choice else None,
            "vpn_bytes_per_s": (choice.vpn_rate or None) if choice else None,
            "use": "their direct" if called else use,
            "why": "they dial us directly, which is faster, and we cannot dial them"
            if called
            else choice.reason
            if choice
            else "not measured yet",
            "measured_ago_s": now_s - choice.measured_s if choice else None,
            "addresses": list(order(choice, hosts[0] if hosts else "", peer.address)),
        }


def _reaches(choice: Choice | None) -> bool:
    """Whether the direct path was reached from here."""
    return choice is not None and choice.direct_rate > 0


def _direct_hosts(peer: Peer) -> list[str]:
    """Addresses outside the VPN: the one that WireGuard uses, unless that is the hub's, then at most two others."""
    hosts = [host for host, _ in peer.direct[:2]]
    if peer.way == "direct" and peer.seen is not None and peer.seen.endpoint is not None:
        hosts.insert(0, peer.seen.endpoint[0])
    return list(dict.fromkeys(hosts))
