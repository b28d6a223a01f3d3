"""Seeded random schedules of the two protocol machines: `python -m atoll.sim.schedules --seed 7 --bug
stale-ready`.

One schedule is a coordinator and one to five peers in virtual time, with drops, delays, duplicates,
reorderings, freezes, kills, crashes of the coordinator at any effect, cut links, wrong results, flipped bits
and orders of an operator, until the trouble stops; then everything has to end well within bounded time. The
invariants (`schedule_checks`) are checked after each event. A seed is a schedule: whatever fails can be replayed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from functools import partial

import msgspec

from atoll.membership.settings import CoordinatorSettings
from atoll.sim.schedule_bugs import BUGS
from atoll.sim.schedule_checks import ViolationError
from atoll.sim.schedule_machines import Machines
from atoll.sim.schedule_operator import plan_orders
from atoll.sim.schedule_peer import Held, VirtualPeer
from atoll.sim.schedule_transcript import print_line
from atoll.sim.schedule_world import TIMEOUTS, Note, World

NAMES = "abcdefghi"
MOST_PEERS = 9
TROUBLE_S = 15.0
CALM_S = 90.0


class Outcome(msgspec.Struct, frozen=True):
    """How a schedule went. `violation` is the broken invariant, "" if there is none."""

    seed: int
    violation: str
    events: int
    versions: int
    virtual_s: float


def _silent(now_s: float, who: str, what: object, reason: str) -> None:
    pass


def run_schedule(seed: int, machines: Machines | None = None, note: Note = _silent) -> Outcome:
    """Play one schedule to its end, or to the first broken invariant."""
    rng = random.Random(seed)
    world: World | None = None
    events = 0
    violation = ""
    try:
        world = World(rng, machines or Machines(), random_settings(rng), note)
        num_peers = max(world.settings.start_peers, rng.randint(1, 5))
        for name in NAMES[:num_peers]:
            world.after(rng.uniform(0.0, 2.0), None, partial(world.start_peer, name))
        plan_trouble(world)
        plan_orders(world, seed, TROUBLE_S)
        end_s = world.now_s + TROUBLE_S + CALM_S
        while not world.is_over() or len(world.processes) < num_peers:
            world.next_event()
            events += 1
            if world.now_s > end_s:
                raise ViolationError(
                    f"nothing hangs: {still_waiting(world)} {CALM_S:g} s after the last trouble"
                )
    except ViolationError as broken:
        violation = str(broken)
    assert world is not None
    return Outcome(seed, violation, events, world.history.version, world.now_s)


def random_settings(rng: random.Random) -> CoordinatorSettings:
    start_peers = rng.randint(1, 5)
    return CoordinatorSettings(
        run="schedule",
        start_peers=start_peers,
        min_peers=rng.randint(1, min(start_peers, 2)),
        policy=rng.choice(("wait", "deadline")),
        max_attempts=rng.randint(2, 5),
        max_seconds=rng.choice((0.0, 0.0, 0.0, 12.0)),
        topology=rng.choice(("auto", "direct", "ring", "two-level")),
        timeouts=TIMEOUTS,
    )


def still_waiting(world: World) -> str:
    peers = [
        f"{each.name} in {each.state.phase}" for each in world.processes if each.alive and not each.ended
    ]
    return "the coordinator" * (not world.finished) + " ".join(["", *peers]) + " had not ended"


# ---- trouble ---------------------------------------------------------------------------------------------


def plan_trouble(world: World) -> None:
    """Draw what goes wrong and when; after TROUBLE_S nothing does any more."""
    rng = world.rng
    for _ in range(rng.choice((0, 2, 4, 6, 9))):
        world.after(rng.uniform(0.5, TROUBLE_S), None, partial(rng.choice(TROUBLES), world))
    world.after(TROUBLE_S, None, lambda: end_trouble(world))


def end_trouble(world: World) -> None:
    world.trouble = False
    world.engine.cut.clear()
    world.engine.wrong_results = 0
    world.effects_to_crash = None


def living(world: World) -> list[VirtualPeer]:
    return [process for process in world.processes if process.alive and not process.ended]


def drop_connection(world: World) -> None:
    for process in world.rng.sample(living(world), k=min(len(living(world)), world.rng.randint(1, 2))):
        if process.connection is not None:
            world.note(process.name, "connection breaks", "")
            world.close(process.connection, delay_s=0.0)


def freeze_peer(world: World) -> None:
    for process in living(world)[:]:
        if world.rng.random() < 0.4:
            process.frozen_until_s = world.now_s + world.rng.uniform(0.3, 6.0)
            world.note(process.name, "frozen", f"until {process.frozen_until_s:.1f}")


def freeze_coordinator(world: World) -> None:
    world.coordinator.frozen_until_s = world.now_s + world.rng.uniform(0.5, 6.0)
    world.note("coordinator", "frozen", f"until {world.coordinator.frozen_until_s:.1f}")


def crash_coordinator(world: World) -> None:
    world.effects_to_crash = world.rng.randint(0, 25)


def kill_peer(world: World) -> None:
    if processes := living(world):
        world.kill(world.rng.choice(processes), silent=world.rng.random() < 0.3)


def replace_peer(world: World) -> None:
    """A process starts under the name of another one, which may still live."""
    if processes := living(world):
        process = world.rng.choice(processes)
        if world.rng.random() < 0.7:
            world.kill(process)
        world.after(world.rng.uniform(0.0, 3.0), None, partial(world.start_peer, process.peer))


def start_another(world: World) -> None:
    """A peer that was not there from the start."""
    names = {process.peer for process in world.processes}
    if len(names) < MOST_PEERS:
        name = next(each for each in NAMES if each not in names)
        world.note(name, "comes late", "")
        world.start_peer(name)


def kill_all(world: World) -> None:
    """A power cut: all come back in another order, each with the snapshot that it had on its disk."""
    kept = {process.peer: process.snapshot() for process in living(world) if process.sound}
    for process in living(world):
        world.kill(process)
    for peer in world.rng.sample(sorted(kept), k=len(kept)):
        delay_s = world.rng.uniform(0.2, 4.0)
        world.after(delay_s, None, partial(world.start_peer, peer, _older(world, kept[peer])))


def _older(world: World, held: Held) -> Held:
    """What this peer's disk has: the newest, or one of the versions before."""
    choices = [held, *(each for each in world.snapshots if each.version <= held.version)]
    return world.rng.choice(choices)


def lose_journal(world: World) -> None:
    world.lose_journal()


def cut_link(world: World) -> None:
    processes = living(world)
    if len(processes) > 1:
        one, other = world.rng.sample(processes, 2)
        _cut(world, {frozenset((one.peer, other.peer))})


def cut_off(world: World) -> None:
    """A peer keeps its coordinator and loses all other peers: no lane avoids its links."""
    if processes := living(world):
        one = world.rng.choice(processes)
        _cut(world, {frozenset((one.peer, other.peer)) for other in processes if other is not one})


def _cut(world: World, pairs: set[frozenset[str]]) -> None:
    world.engine.cut |= pairs
    world.after(world.rng.uniform(0.5, 8.0), None, lambda: world.engine.cut.difference_update(pairs))


def wrong_results(world: World) -> None:
    world.engine.wrong_results += world.rng.randint(1, 2)


def flip_bit(world: World) -> None:
    if processes := living(world):
        process = world.rng.choice(processes)
        process.digest += "!"
        process.sound = False
        world.note(process.name, "bit flips", process.digest)


TROUBLES = (
    drop_connection,
    drop_connection,
    freeze_peer,
    freeze_coordinator,
    crash_coordinator,
    crash_coordinator,
    kill_peer,
    replace_peer,
    cut_link,
    cut_off,
    wrong_results,
    flip_bit,
    start_another,
    start_another,
    kill_all,
    lose_journal,
)


# ---- command line ----------------------------------------------------------------------------------------


def replay_command(seed: int, bug: str | None) -> str:
    return f"python -m atoll.sim.schedules --seed {seed}" + (f" --bug {bug}" if bug else "")


def main(arguments: list[str] | None = None) -> int:
    """Run many schedules, or replay one with its transcript."""
    parser = argparse.ArgumentParser(prog="python -m atoll.sim.schedules", description=main.__doc__)
    parser.add_argument("--seed", type=int, help="replay this schedule and print its transcript")
    parser.add_argument("--count", type=int, default=1000, help="how many schedules to run without --seed")
    parser.add_argument("--first", type=int, default=0, help="the first seed of them")
    parser.add_argument("--bug", choices=sorted(BUGS), help="plant this bug")
    options = parser.parse_args(arguments)
    machines = BUGS[options.bug] if options.bug else Machines()
    if options.seed is not None:
        outcome = run_schedule(options.seed, machines, print_line)
        print(
            outcome.violation or f"all invariants held: {outcome.versions} versions, {outcome.events} events"
        )
        return int(bool(outcome.violation))
    begun_s, events, versions = time.process_time(), 0, 0
    for seed in range(options.first, options.first + options.count):
        outcome = run_schedule(seed, machines)
        events, versions = events + outcome.events, versions + outcome.versions
        if outcome.violation:
            print(f"seed {seed}: {outcome.violation}\nreplay with: {replay_command(seed, options.bug)}")
            return 1
    seconds = time.process_time() - begun_s
    what = f"{options.count} schedules, {events} events, {versions} versions"
    print(f"{what}: all invariants held, {seconds:.1f} s of CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())
