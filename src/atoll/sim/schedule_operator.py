"""Orders of an operator in some schedules, and what has to follow from them."""

from __future__ import annotations

import random
from functools import partial

from atoll.membership.operator import EvictPeer, LeavePeer, StopRun
from atoll.membership.steps import OperatorSaid
from atoll.sim.schedule_checks import require
from atoll.sim.schedule_world import World

SHARE = 0.3
"""So many schedules have an operator. It draws from a generator of its own, so the others are what they always were."""


def plan_orders(world: World, seed: int, within_s: float) -> None:
    """Draw which orders come and when."""
    rng = random.Random(f"operator of {seed}")
    if rng.random() >= SHARE:
        return
    for _ in range(rng.randint(1, 3)):
        world.after(rng.uniform(0.5, within_s), None, partial(_give_order, world, rng))


def _give_order(world: World, rng: random.Random) -> None:
    """A coordinator that is down, or frozen, hears nothing."""
    coordinator = world.coordinator
    if not coordinator.alive or coordinator.frozen_until_s > world.now_s or coordinator.state.over:
        return
    peer = rng.choice("abcde")
    request = rng.choice(
        (
            StopRun("enough"),
            LeavePeer(peer, ""),
            EvictPeer(peer, "", rng.choice((0.0, 3.0))),
            LeavePeer(peer, ""),
        )
    )
    coordinator.feed(OperatorSaid(1, request))
    if not coordinator.alive:
        return
    state = coordinator.state
    match request:
        case StopRun():
            require(bool(state.stopping or state.over or state.ending()), "a stop is heard and nothing ends")
        case EvictPeer():
            require(
                peer not in state.peers or not state.eviction(peer, world.now_s - state.paused_s),
                f"{peer} is evicted and has a seat",
            )
