"""How many bytes a plan must move, and the least seconds in which a network of given rates could do it."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.plan.bounds import bounds
from atoll.plan.grid import Grid
from atoll.plan.links import measured_links
from atoll.plan.traffic import traffic
from atoll.values import LinkRate, Plan

PAYLOAD_SHARE = 0.965
"""Of the bytes of full TCP segments over a path of MTU 1500, so many are payload (1448 of 1500)."""


def sent_bytes(plan: Plan, grid: Grid) -> dict[str, int]:
    """What each member sends by the plan: payloads, a header for each, and an acknowledgement for each received."""
    contributors = [contribution.peer for contribution in plan.contributions]
    moved = traffic(
        plan.lanes, plan.members, grid, plan.codec, chunk_bytes=plan.chunk_bytes, contributors=contributors
    )
    return {member: each.sent_bytes for member, each in moved.items()}


def payload_rate(mbit: float) -> float:
    """Bytes of payload per second on a link of so many Mbit/s of packets."""
    return mbit * 1e6 / 8 * PAYLOAD_SHARE


def lower_bound_s(links: Sequence[LinkRate], members: Sequence[str], wire_bytes: int) -> float:
    """What no all-reduce can beat over these links, one round trip of the longest included."""
    rtt_s = max((link.rtt_s for link in links), default=0.0)
    found = bounds(measured_links(members, links), wire_bytes)
    return found.seconds + rtt_s if found.seconds else 0.0


def even_links(members: Sequence[str], bytes_per_s: float, rtt_s: float) -> tuple[LinkRate, ...]:
    """Links bounded by nothing but equal access lines."""
    lines = [
        link
        for peer in members
        for link in (LinkRate(peer, "", bytes_per_s), LinkRate("", peer, bytes_per_s))
    ]
    pairs = [LinkRate(a, b, bytes_per_s, rtt_s) for a in members for b in members if a != b]
    return (*lines, *pairs)
