"""Sources share one line: alike ones give alike, whoever begins first; a slow one holds nobody up for long."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from atoll.recovery.board import Board, Take

STEP_S = 0.01
PIECE = 4 << 20
LINE = 12e6
"""Bytes a second: what the fetcher's line carries."""


@dataclass(eq=False)
class Thing:
    count: int

    def pieces(self) -> tuple[int, ...]:
        return tuple(range(self.count))

    def piece_bytes(self, number: int) -> int:
        return PIECE


@dataclass
class Donor:
    """Begins at `from_s`, carries at most `cap`, and gets `weight` of a line that is full; frozen from `until_s` on."""

    from_s: float = 0.0
    cap: float = LINE
    weight: float = 1.0
    until_s: float = float("inf")
    workers: int = 2

    def gives(self, now_s: float) -> bool:
        return self.from_s <= now_s


def rates(moving: dict[str, Donor]) -> dict[str, float]:
    """What each carries: those with the least cap for their weight are served first, the others share what is left."""
    left, weight, found = LINE, sum(donor.weight for donor in moving.values()), {}
    for name in sorted(moving, key=lambda name: moving[name].cap / moving[name].weight):
        found[name] = min(moving[name].cap, left * moving[name].weight / weight)
        left, weight = left - found[name], weight - moving[name].weight
    return found


def fetch(count: int, donors: dict[str, Donor]) -> tuple[float, dict[str, int]]:
    """Seconds until all is there, and pieces by donor."""
    board: Board[str, Thing] = Board()
    item = Thing(count)
    board.add(item)
    at_work: dict[str, list[Take[str, Thing]]] = {name: [] for name in donors}
    given = dict.fromkeys(donors, 0)
    tick, now_s = 0, 0.0
    while board.num_left(item):
        for name, donor in donors.items():
            while donor.gives(now_s) and len(at_work[name]) < donor.workers:
                others = [each for each in donors if each != name and donors[each].gives(now_s)]
                take = board.take(name, lambda item: True, now_s, lambda item, others=others: others)
                if take is None:
                    break
                at_work[name].append(take)
        moving = {name: donors[name] for name in donors if at_work[name] and now_s < donors[name].until_s}
        for name, rate in rates(moving).items():
            for take in list(at_work[name]):
                board.got(take, int(rate * STEP_S / len(at_work[name])), now_s)
                if take.got_bytes >= PIECE:
                    for loser in board.finish(take, now_s) or []:
                        at_work[loser.source].remove(loser)
                        board.give_up(loser)
                    at_work[name].remove(take)
                    given[name] += 1
        tick += 1
        now_s = tick * STEP_S
        assert now_s < 1000, "it never ends"
    return now_s, given


@pytest.mark.parametrize(
    "odd",
    [Donor(weight=5.0), Donor(from_s=1.0), Donor(weight=0.2), Donor(from_s=1.0, weight=0.2)],
    ids=["favoured", "late", "held-down", "late-and-held-down"],
)
@pytest.mark.parametrize("count", [10, 40])
def test_three_alike_give_a_fifth_each_and_cost_no_time(odd: Donor, count: int) -> None:
    took_s, given = fetch(count, {"a": Donor(), "b": Donor(), "odd": odd})
    assert min(given.values()) >= count / 5, given
    assert took_s <= 1.05 * count * PIECE / LINE, "the line was full all the time"


def test_a_slow_donor_holds_the_others_up_for_a_moment_only() -> None:
    took_s, given = fetch(60, {"a": Donor(), "slow": Donor(cap=LINE / 20)})
    assert given["slow"] <= 6
    assert took_s <= 1.15 * 60 * PIECE / LINE


def test_each_gives_what_its_line_carries() -> None:
    took_s, given = fetch(60, {"a": Donor(cap=LINE / 2), "b": Donor(cap=LINE / 4), "c": Donor(cap=LINE / 4)})
    assert given["a"] >= 24
    assert took_s <= 1.15 * 60 * PIECE / LINE


def test_nobody_waits_for_a_donor_that_froze() -> None:
    took_s, given = fetch(30, {"a": Donor(), "b": Donor(), "frozen": Donor(until_s=1.0)})
    assert given["frozen"] <= 2
    assert took_s <= 30 * PIECE / LINE + 3.0, "it is found out, its pieces are fetched again"


def test_one_alone_waits_for_nobody() -> None:
    took_s, _ = fetch(10, {"a": Donor(), "far-off": Donor(from_s=900.0)})
    assert took_s <= 10 * PIECE / LINE + 0.1


def test_nobody_waits_while_nothing_comes() -> None:
    """Whoever was held up as all were has no rate to go by."""
    board: Board[str, Thing] = Board()
    board.add(Thing(4))

    def ask(now_s: float) -> Take[str, Thing] | None:
        return board.take("a", lambda item: True, now_s, lambda item: ["b"])

    for _ in range(2):
        take = ask(0.0)
        assert take is not None
        board.got(take, PIECE, 0.1)
        board.finish(take, 0.1)
    assert ask(5.0) is None, "b is to give its part"
    assert ask(5.4) is None
    assert ask(5.6) is not None
