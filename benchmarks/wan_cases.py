"""The networks on which the engine is measured, how much it moves there, and the bound of each.

Rates are each site's up and down link, in Mbit/s of IP packets; bounds count the payload of full segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.cli.bench.bounds import lower_bound_s, payload_rate
from atoll.cli.bench.plans import members_of
from atoll.values import LinkRate

Network = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """One way to run a case; a field left empty is the plan's own choice."""

    topology: str = "auto"
    connections: int = 0
    chunk_kb: int = 0
    idle: bool = False

    @property
    def label(self) -> str:
        parts = [self.topology]
        parts += [f"{self.connections} conn"] * bool(self.connections)
        parts += [f"{self.chunk_kb} kB"] * bool(self.chunk_kb)
        return ", ".join(parts)


@dataclass(frozen=True)
class Case:
    """`numel` is at least ten times the bandwidth-delay product for each site, unless the text says otherwise."""

    text: str
    network: Network
    numel: int
    variants: tuple[Variant, ...]
    codec: str = "int8"
    gso: bool = False
    warm_turns: int = 4
    """Before those that count, beside the one that is checked: the engines learn what the way carries, and TCP gets
    over its first overshoot; under loss windows shrink to what they stay at."""

    @property
    def links(self) -> tuple[LinkRate, ...]:
        """What is true of the network, in payload."""
        sites = list(self.network["sites"])
        name = dict(zip(sites, members_of(len(sites)), strict=True))
        default = self.network["default"]
        pairs = {(a, b): dict(default) for a in sites for b in sites if a != b}
        for link in self.network["links"]:
            pairs[link["a"], link["b"]] |= link
            pairs[link["b"], link["a"]] |= link
        found = []
        for site, access in self.network["sites"].items():
            found.append(LinkRate(name[site], "", payload_rate(access["up"] / 1e6)))
            found.append(LinkRate("", name[site], payload_rate(access["down"] / 1e6)))
        for (a, b), link in pairs.items():
            mbit = (
                min(self.network["sites"][a]["up"], self.network["sites"][b]["down"], link.get("rate", 1e12))
                / 1e6
            )
            trip_s, loss = link["rtt_ms"] / 1e3, link.get("loss", 0.0)
            found.append(LinkRate(name[a], name[b], payload_rate(mbit), trip_s, loss))
        return tuple(found)

    def bound_s(self, wire_bytes: int) -> float:
        """The least time any all-reduce can take that gets no help from the network."""
        return lower_bound_s(self.links, members_of(len(self.network["sites"])), wire_bytes)


def sites(rates_mbit: Mapping[str, float], **default: Any) -> Network:
    described = {name: {"up": mbit * 1e6, "down": mbit * 1e6} for name, mbit in rates_mbit.items()}
    return {"sites": described, "default": default, "links": []}


def alike(text: str, world: int, mbit: float, rtt_ms: float, numel: int, **more: Any) -> Case:
    """Sites of one rate, all as far apart."""
    rates = {f"s{index}": mbit for index in range(world)}
    network = sites(rates, rtt_ms=rtt_ms, loss=more.pop("loss", 0.0))
    return Case(text=text, network=network, numel=numel, **more)


def slow_site() -> Case:
    rates = {"s0": 200.0, "s1": 200.0, "s2": 200.0, "slow": 50.0}
    return Case(
        text="3 sites of 200 Mbit/s and one of 50, 80 ms",
        network=sites(rates, rtt_ms=80),
        numel=40_000_000,
        variants=(Variant("auto", idle=True), *map(Variant, ("direct", "equal", "ring"))),
    )


def thin_link() -> Case:
    """Each of the nine pairs across has 10 Mbit/s; so an all-reduce that crosses once takes a third of one that
    sends everything to everybody."""
    west, east = ("w0", "w1", "w2"), ("e0", "e1", "e2")
    rates = dict.fromkeys((*west, *east), 500.0)
    network = sites(rates, rtt_ms=10)
    network["links"] = [{"a": a, "b": b, "rtt_ms": 80, "rate": 10e6} for a in west for b in east]
    return Case(
        text="two regions of 3 sites (500 Mbit/s, 10 ms); 10 Mbit/s, 80 ms for each pair across",
        network=network,
        numel=20_000_000,
        variants=(Variant("auto", idle=True), *map(Variant, ("two-level", "direct", "ring"))),
    )


def default_variants(*, idle: bool) -> tuple[Variant, ...]:
    return (Variant("auto", idle=idle), Variant("direct"), Variant("ring"))


CASES: dict[str, Case] = {
    "two": alike("2 sites, 200 Mbit/s, 80 ms", 2, 200, 80, 40_000_000, variants=default_variants(idle=True)),
    "four": alike("4 sites, 200 Mbit/s, 80 ms", 4, 200, 80, 80_000_000, variants=default_variants(idle=True)),
    "eight": alike("8 sites, 50 Mbit/s, 80 ms", 8, 50, 80, 40_000_000, variants=default_variants(idle=True)),
    "slow-site": slow_site(),
    "thin-link": thin_link(),
    "loss": alike(
        "2 sites, 200 Mbit/s, 100 ms, 0.1 % loss",
        2,
        200,
        100,
        10_000_000,
        loss=0.001,
        warm_turns=40,
        variants=(Variant("auto"), *(Variant("direct", connections) for connections in (1, 4, 16))),
    ),
    "fat": alike(
        "2 sites, 4 Gbit/s, 80 ms, super-packets carried whole",
        2,
        4000,
        80,
        200_000_000,
        codec="fp32",
        gso=True,
        variants=(
            Variant("auto", idle=True),
            *(Variant("direct", connections) for connections in (8, 16, 32)),
        ),
    ),
}
