"""A plan for a benchmark's members, by the planner that runs use: lanes chosen or forced, from rates given or seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from atoll.cli.bench.member import peer_name
from atoll.errors import ConfigError
from atoll.plan.candidates import TOPOLOGIES as PLANNED
from atoll.plan.grid import Grid
from atoll.plan.lanes import direct_lanes
from atoll.plan.planner import choose
from atoll.values import CODECS, Contribution, LinkRate, OpId, Plan, PlanChoice, PlanRequest, Range, RankInfo

DEADLINE_S = 300.0
EQUAL = "equal"
TOPOLOGIES = (*PLANNED, EQUAL)
"""The planner's, and direct lanes whose shares are equal whatever the rates."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is asked of the plan; 0 connections or chunk bytes: the plan's own choice."""

    codec: str
    topology: str = "auto"
    connections: int = 0
    chunk_bytes: int = 0
    tls: bool = False

    @property
    def name(self) -> str:
        return f"{self.codec} tls" if self.tls else self.codec


def check_codec(name: str) -> str:
    """ConfigError, with the list, for one that is unknown."""
    if name not in CODECS:
        raise ConfigError(f"--codec {name}: unknown; there are: {', '.join(CODECS)}")
    return name


def check_topology(name: str) -> str:
    if name not in TOPOLOGIES:
        raise ConfigError(f"--topology {name}: unknown; there are: {', '.join(TOPOLOGIES)}")
    return name


def members_of(world: int) -> tuple[str, ...]:
    return tuple(peer_name(index) for index in range(world))


def choice_for(recipe: Recipe, world: int, numel: int, links: Sequence[LinkRate]) -> PlanChoice:
    """Lanes for members of whom all contribute, by what is known of their links."""
    members = members_of(world)
    request = PlanRequest(
        members=members,
        contributors=members,
        wire_bytes=Grid.of([numel]).wire_bytes(recipe.codec),
        codec=recipe.codec,
        links=tuple(links),
        topology="direct" if recipe.topology == EQUAL else recipe.topology,
        connections=recipe.connections,
    )
    choice = choose(request)
    changes: dict[str, object] = {"chunk_bytes": recipe.chunk_bytes or choice.chunk_bytes}
    if recipe.topology == EQUAL:
        changes |= {"lanes": direct_lanes(members), "topology": EQUAL, "predicted_s": 0.0}
    return msgspec.structs.replace(choice, **changes)


def plan_for(
    choice: PlanChoice, codec: str, engines: Sequence[tuple[str, int]], numel: int, round_number: int
) -> Plan:
    """Everybody contributes with weight 1. Every call needs a `round_number` of its own."""
    members = members_of(len(engines))
    return Plan(
        op=OpId(1, round_number),
        base_version=0,
        members=members,
        contributions=tuple(Contribution(peer, 1) for peer in members),
        ranks={
            peer: (RankInfo(host, port, (Range(0, numel),)),)
            for peer, (host, port) in zip(members, engines, strict=True)
        },
        lanes=choice.lanes,
        codec=codec,
        deadline_s=DEADLINE_S,
        chunk_bytes=choice.chunk_bytes,
        connections=choice.connections,
    )
