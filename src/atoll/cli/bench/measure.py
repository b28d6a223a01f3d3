"""Contenders take turns, in random order, so that whatever else the machine does disturbs all alike; then rows."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from atoll.cli.bench.bounds import lower_bound_s, sent_bytes
from atoll.cli.bench.crew import Crew
from atoll.cli.bench.messages import Exchange, Fill, Order, Reduce, Rival, Took
from atoll.cli.bench.plans import DEADLINE_S, Recipe, choice_for, members_of, plan_for
from atoll.errors import Diverged
from atoll.membership.rates import Rates, known_links, learn
from atoll.plan.grid import Grid
from atoll.values import LinkRate, Plan, PlanChoice

WITHIN_S = 2 * DEADLINE_S
MEASURED, COMPUTED = "bare sockets", "given rates"


@dataclass(frozen=True, slots=True)
class Turn:
    """One contender's turn: the slowest member's seconds, the mean CPU seconds, the most bytes that one sent."""

    seconds: float
    cpu_s: float
    wire_s: float
    sent_bytes: int | None
    extra_bytes: int | None
    rel_error: float | None
    equal: bool

    @staticmethod
    def of(took: Sequence[Took]) -> Turn:
        counted = [one.sent_bytes for one in took if one.sent_bytes is not None]
        extra = [one.extra_bytes for one in took if one.extra_bytes is not None]
        return Turn(
            seconds=max(one.seconds for one in took),
            cpu_s=statistics.fmean(one.cpu_s for one in took),
            wire_s=max(one.wire_s for one in took),
            sent_bytes=max(counted, default=None),
            extra_bytes=max(extra, default=None),
            rel_error=None if took[0].rel_error is None else max(one.rel_error or 0.0 for one in took),
            equal=len({one.digest for one in took}) == 1,
        )


@dataclass(slots=True)
class Contender:
    """Somebody who moves the same values: `orders(check)` for each member.

    `choice` is how ours was planned last; `planned_bytes` what the busiest member was to send, of the most in a turn.
    """

    name: str
    orders: Callable[[bool], list[Order]]
    turns: list[Turn] = field(default_factory=list)
    checked: Turn | None = None
    choice: PlanChoice | None = None
    planned_bytes: int = 0

    @property
    def seconds(self) -> float:
        return statistics.median(turn.seconds for turn in self.turns)

    @property
    def cpu_s(self) -> float:
        return statistics.median(turn.cpu_s for turn in self.turns)


class Figures(msgspec.Struct, frozen=True):
    """One rival's numbers, from turns among ours."""

    seconds: float
    cpu_s: float
    rel_error: float
    equal: bool


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One codec at one size. Seconds are medians over the turns, of the slowest member; bytes of the busiest one.

    `extra_bytes` is the memory that the first all-reduce took at most, beyond the caller's buffers; `wire_bytes` the
    size of one encoded vector. `lower_bound_s`: the bound of the network that was named, else what bare sockets of the
    same processes took for the bytes of equal shares, among the turns. `predicted_s` and `reason` are the plan's.
    `compared` holds what each rival took, `speedup` how many times faster we were.
    """

    codec: str
    tls: bool
    topology: str
    connections: int
    world: int
    numel: int
    turns: int
    seconds: float
    seconds_min: float
    seconds_max: float
    wire_s: float
    cpu_s: float
    bytes_sent: int
    bytes_formula: int
    extra_bytes: int | None
    wire_bytes: int
    lower_bound_s: float
    bound: str
    ratio: float
    rel_error: float
    equal: bool
    speedup: dict[str, float]
    compared: dict[str, Figures]
    predicted_s: float
    reason: str


class Bench:
    """One crew, measured at any number of sizes. Every op of it has a number of its own.

    Plans are made from `links` if they are given. Else from what the members' own engines saw in earlier turns, as a
    run's coordinator would; nothing, at first.
    """

    def __init__(self, crew: Crew, order: random.Random, links: Sequence[LinkRate] = ()) -> None:
        self._crew, self._order, self._given = crew, order, tuple(links)
        self._seen: Rates = {}
        self._rounds = 0

    @property
    def world(self) -> int:
        return len(self._crew.seats)

    @property
    def links(self) -> tuple[LinkRate, ...]:
        return self._given or known_links(self._seen)

    def choose(self, recipe: Recipe, numel: int) -> PlanChoice:
        return choice_for(recipe, self.world, numel, self.links)

    def plan(self, choice: PlanChoice, recipe: Recipe, numel: int) -> Plan:
        self._rounds += 1
        engines = self._crew.tls_engines if recipe.tls else self._crew.engines
        return plan_for(choice, recipe.codec, engines, numel, self._rounds)

    def fill(self, numel: int, seed: int) -> None:
        self._crew.ask_all(Fill(numel=numel, seed=seed), Took, WITHIN_S)

    def ours(self, name: str, recipe: Recipe, numel: int) -> Contender:
        """Planned anew for every turn."""

        def orders(check: bool) -> list[Order]:
            contender.choice = self.choose(recipe, numel)
            plan = self.plan(contender.choice, recipe, numel)
            sent = max(sent_bytes(plan, Grid.of([numel])).values())
            contender.planned_bytes = sent if check else max(sent, contender.planned_bytes)
            return [Reduce(plan=plan, tls=recipe.tls, check=check)] * self.world

        contender = Contender(name, orders)
        return contender

    def rival(self, name: str) -> Contender:
        return Contender(name, lambda check: [Rival(name=name, check=check)] * self.world)

    def sockets(self, name: str, num_bytes: int, streams: int = 1) -> Contender:
        """Every member sends `num_bytes` in all, in equal parts to the others, and receives as much."""
        share = num_bytes // max(1, self.world - 1)

        def targets(index: int) -> tuple[int, ...]:
            return tuple(other for other in range(self.world) if other != index)

        orders: list[Order] = [
            Exchange(num_bytes=share, targets=targets(index), streams=streams) for index in range(self.world)
        ]
        return Contender(name, lambda _check: orders)

    def measure(self, contenders: Sequence[Contender], turns: int) -> None:
        """One turn each that does not count, in which results are checked, then `turns` each, interleaved."""
        for contender in contenders:
            contender.checked = self.turn(contender, check=True)
        for _ in range(turns):
            for contender in self._order.sample(list(contenders), len(contenders)):
                contender.turns.append(self.turn(contender))

    def turn(self, contender: Contender, *, check: bool = False) -> Turn:
        took = self._crew.ask(contender.orders(check), Took, WITHIN_S)
        members = members_of(self.world)
        reports = {peer: one.links for peer, one in zip(members, took, strict=True) if one.links}
        if reports:
            self._seen, _ = learn(self._seen, reports, self._rounds, members)
        return Turn.of(took)


def all_reduce_rows(
    bench: Bench,
    recipes: Sequence[Recipe],
    numels: Sequence[int],
    *,
    rivals: Sequence[str],
    turns: int,
    seed: int,
    links: Sequence[LinkRate],
) -> Iterator[Row]:
    """A row for each recipe and size; bounds are of `links`, or measured if there are none.

    Raises Diverged if members of one of our ops hold different bytes.
    """
    for numel in numels:
        bench.fill(numel, seed)
        ours = [bench.ours(recipe.name, recipe, numel) for recipe in recipes]
        others = [bench.rival(name) for name in rivals]
        bare = [] if links or bench.world == 1 else [bare_sockets(bench, recipe, numel) for recipe in recipes]
        bench.measure([*ours, *others, *bare], turns)
        for position, recipe in enumerate(recipes):
            wire_bytes = Grid.of([numel]).wire_bytes(recipe.codec)
            if bare:
                bound, bound_s = MEASURED, bare[position].seconds
            else:
                bound, bound_s = COMPUTED, lower_bound_s(links, members_of(bench.world), wire_bytes)
            yield row_of(bench, ours[position], recipe, numel, others, bound, bound_s)


def bare_sockets(bench: Bench, recipe: Recipe, numel: int) -> Contender:
    """The bytes of an all-reduce with equal shares, over bare sockets."""
    plan = bench.plan(bench.choose(replace(recipe, topology="equal"), numel), recipe, numel)
    return bench.sockets("sockets", max(sent_bytes(plan, Grid.of([numel])).values()))


def row_of(
    bench: Bench,
    ours: Contender,
    recipe: Recipe,
    numel: int,
    others: Sequence[Contender],
    bound: str,
    bound_s: float,
) -> Row:
    assert ours.checked is not None
    assert ours.choice is not None
    if not ours.checked.equal:
        raise Diverged(f"the members of an all-reduce in {recipe.codec} hold different bytes")
    seconds, choice = ours.seconds, ours.choice
    return Row(
        codec=recipe.codec,
        tls=recipe.tls,
        topology=choice.topology,
        connections=choice.connections,
        world=bench.world,
        numel=numel,
        turns=len(ours.turns),
        seconds=seconds,
        seconds_min=min(turn.seconds for turn in ours.turns),
        seconds_max=max(turn.seconds for turn in ours.turns),
        wire_s=statistics.median(turn.wire_s for turn in ours.turns),
        cpu_s=ours.cpu_s,
        bytes_sent=max(turn.sent_bytes or 0 for turn in (ours.checked, *ours.turns)),
        bytes_formula=ours.planned_bytes,
        extra_bytes=ours.checked.extra_bytes,
        wire_bytes=Grid.of([numel]).wire_bytes(recipe.codec),
        lower_bound_s=bound_s,
        bound=bound,
        ratio=seconds / bound_s if bound_s else 0.0,
        rel_error=ours.checked.rel_error or 0.0,
        equal=ours.checked.equal,
        speedup={other.name: other.seconds / seconds for other in others},
        compared={other.name: _figures(other) for other in others},
        predicted_s=choice.predicted_s,
        reason=choice.reason,
    )


def _figures(other: Contender) -> Figures:
    assert other.checked is not None
    return Figures(other.seconds, other.cpu_s, other.checked.rel_error or 0.0, other.checked.equal)
