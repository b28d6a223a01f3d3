"""Where the peers' VPN meets: who is there, by which key, and where each may be reached. Pure, and only in memory.

Every peer's `atoll vpn up` announces itself every few seconds and hears of the others. An entry that is not renewed for
`FRESH_S` is gone; a restarted coordinator has learned them all again after as long, and says until then that it has not
*settled*. Private keys never come here, and addresses inside the VPN follow from public keys: nobody hands them out.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Collection, Mapping

import msgspec

from atoll.addresses import join_address, split_address
from atoll.membership.operator import Done, VpnAnnounce, VpnEntry, VpnMesh
from atoll.membership.register import VPN_SUFFIX
from atoll.values import LinkRate

FRESH_S = 60.0
MAX_ENTRIES = 1024
MAX_ENDPOINTS = 8
MAX_NAME_CHARS = 128
KEY_BYTES = 32


def certificate_name(peer: str) -> str:
    """The name that a peer's VPN has a certificate for, in a run with TLS. Not the peer's own: a certificate is over
    once its trainer comes with a newer one."""
    return f"{peer}{VPN_SUFFIX}"


def network_of(run: str, secret: bytes) -> str:
    """The /64 of a run's VPN, out of the private addresses of IPv6 (RFC 4193): the same after a coordinator's restart,
    another one for another run. It tells nothing about `secret`, which lasts as long as the run."""
    drawn = hmac.digest(secret, b"atoll vpn network " + run.encode(), hashlib.sha256)
    return str(ipaddress.IPv6Network((b"\xfd" + drawn[:7] + bytes(8), 64)))


class _Held(msgspec.Struct):
    said: VpnAnnounce
    seen_host: str
    since: int
    renewed_s: float


class VpnBoard:
    """One run's board. For one thread; `now_s` is the coordinator's own clock."""

    def __init__(self, network: str, now_s: float) -> None:
        self._network, self._begun_s = network, now_s
        self._held: dict[str, _Held] = {}
        self._arrivals = 0

    def hear(
        self,
        said: VpnAnnounce,
        seen_host: str,
        now_s: float,
        *,
        evicted: Collection[str] = (),
        links: Mapping[tuple[str, str], float] | None = None,
    ) -> VpnMesh | Done:
        """What a peer hears for its announcement, which came from `seen_host`; Done if it is refused.

        `evicted` are the names that the run refuses, `links` the rates that engines saw, in bytes per second.
        """
        for name, held in list(self._held.items()):
            if now_s - held.renewed_s > FRESH_S or name in evicted:
                del self._held[name]
        if said.leaving:
            held_by = self._held.get(said.peer)
            if held_by is not None and held_by.said.public_key == said.public_key:
                del self._held[said.peer]
            return Done(ok=True, reason=f"{said.peer} has left the VPN")
        if refusal := self._refusal(said, evicted):
            return Done(ok=False, reason=refusal)
        known = self._held.get(said.peer)
        self._arrivals += known is None
        since = self._arrivals if known is None else known.since
        self._held[said.peer] = _Held(said, seen_host, since, now_s)
        if said.peer != self._hub():
            said.seen.clear()  # only a hub is asked; so what is held stays small
        return self._mesh(said.peer, now_s, links or {})

    def _refusal(self, said: VpnAnnounce, evicted: Collection[str]) -> str:
        """Why this announcement is not taken; "" if it is."""
        if not (said.peer.isprintable() and 0 < len(said.peer) <= MAX_NAME_CHARS):
            return f"a peer's name needs 1 to {MAX_NAME_CHARS} printable characters; choose one with --peer"
        if said.peer in evicted:
            return f"{said.peer} was evicted from the run, so it has no place in its VPN"
        ports = (said.port, said.ping_port, said.relay_port)
        if len(said.public_key) != KEY_BYTES or not all(0 <= port < 65536 for port in ports) or not said.port:
            return f"{said.peer} announced no WireGuard key and port; use the coordinator's version of Atoll"
        if len(said.endpoints) > MAX_ENDPOINTS or not all(map(_is_endpoint, said.endpoints)):
            return f"{said.peer} announced endpoints that are no addresses, or more than {MAX_ENDPOINTS}"
        if len(said.seen) > MAX_ENTRIES or not all(map(_is_endpoint, said.seen.values())):
            return f"{said.peer} said of others what is no address"
        for name, held in self._held.items():
            if (name == said.peer) != (held.said.public_key == said.public_key):
                return (
                    f"the name {name} is taken by another machine's key; choose another name with --peer, or "
                    f"wait {FRESH_S:g} s if that machine is gone"
                    if name == said.peer
                    else f"{name} has the same key as {said.peer}: a key file was copied; remove it on one of them"
                )
        if said.peer not in self._held and len(self._held) >= MAX_ENTRIES:
            return f"the VPN is full: {MAX_ENTRIES} peers"
        return ""

    def _mesh(self, asker: str, now_s: float, links: Mapping[tuple[str, str], float]) -> VpnMesh:
        hub = self._hub()
        seen = self._held[hub].said.seen if hub else {}
        return VpnMesh(
            network=self._network,
            entries=tuple(
                VpnEntry(
                    peer=name,
                    public_key=held.said.public_key,
                    port=held.said.port,
                    ping_port=held.said.ping_port,
                    relay_port=held.said.relay_port,
                    endpoints=_endpoints(held, seen.get(name, "")),
                )
                for name, held in sorted(self._held.items())
            ),
            hub=hub,
            settled=now_s - self._begun_s >= FRESH_S,
            links=tuple(
                LinkRate(source, target, rate)
                for (source, target), rate in sorted(links.items())
                if source == asker and target in self._held
            ),
        )

    def _hub(self) -> str:
        """Who asked to be it, else who is behind no NAT; of several the one that came first. "": nobody is."""
        chosen = [held for held in self._held.values() if held.said.hub and held.said.relay_port]
        able = chosen or [held for held in self._held.values() if _is_open(held)]
        return min(able, key=lambda held: held.since).said.peer if able else ""


def _is_open(held: _Held) -> bool:
    """Whether it comes from an address that it knows as its own, so no NAT is between, and can relay."""
    return bool(held.said.relay_port) and held.seen_host in {
        split_address(endpoint)[0] for endpoint in held.said.endpoints
    }


def _endpoints(held: _Held, seen_by_hub: str) -> tuple[str, ...]:
    """Where to try, best first: what a person said, where the hub and the coordinator see it, what else it knows."""
    said = held.said
    found = [*said.endpoints[: max(0, said.stated)]]
    if seen_by_hub:
        found.append(seen_by_hub)
    if _is_host(held.seen_host):
        found.append(join_address(held.seen_host, said.port))
    return tuple(dict.fromkeys([*found, *said.endpoints]))


def _is_endpoint(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if in_brackets else host
    return (
        bool(colon) and (":" in bare) == in_brackets and _is_host(bare) and port.isdecimal() and len(port) < 6
    )


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text
