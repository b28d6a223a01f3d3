"""Who fetches which piece: everything once in the normal case; the last pieces go to the fast."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from atoll.recovery.board import MAX_SECOND_TAKES, Board, Take


@dataclass(eq=False)
class Thing:
    """An item of so many pieces, 100 bytes each."""

    count: int

    def pieces(self) -> tuple[int, ...]:
        return tuple(range(self.count))

    def piece_bytes(self, number: int) -> int:
        return 100


def give(item: Thing) -> bool:
    return True


@pytest.fixture
def board() -> Board[str, Thing]:
    return Board()


def take(board: Board[str, Thing], source: str, now_s: float) -> Take[str, Thing]:
    found = board.take(source, give, now_s)
    assert found is not None
    return found


def test_pieces_go_out_in_order_and_once(board: Board[str, Thing]) -> None:
    first, second = Thing(2), Thing(1)
    board.add(first)
    board.add(second)
    taken = [take(board, source, 0.0) for source in ("a", "b", "a")]
    assert [(each.item, each.number) for each in taken] == [(first, 0), (first, 1), (second, 0)]
    assert board.take("c", give, 0.1) is None
    for each in taken:
        assert board.finish(each, 0.2) == []
    assert board.num_left(first) == board.num_left(second) == 0
    assert not board.is_busy()


def test_a_source_takes_only_what_it_gives(board: Board[str, Thing]) -> None:
    first, second = Thing(1), Thing(1)
    board.add(first)
    board.add(second)
    found = board.take("a", lambda item: item is second, 0.0)
    assert found is not None
    assert found.item is second


def test_what_is_given_up_is_taken_next_by_another(board: Board[str, Thing]) -> None:
    item = Thing(3)
    board.add(item)
    given_up = take(board, "a", 0.0)
    take(board, "b", 0.0)
    board.give_up(given_up, lacks_it=True)
    assert board.take("a", give, 0.0) is None, "it lacks the item"
    assert take(board, "b", 0.0).number == 0
    board.offers_again("a")
    assert take(board, "a", 0.0).number == 2


def test_a_piece_of_a_silent_source_is_taken_again_and_the_loser_called_off(board: Board[str, Thing]) -> None:
    item = Thing(2)
    board.add(item)
    silent, quick = take(board, "a", 0.0), take(board, "b", 0.0)
    quick.got(100, 0.1)
    board.finish(quick, 0.1)
    assert board.take("b", give, 1.0) is None, "a silence of a moment is none"
    again = take(board, "b", 1.2)
    assert again.number == silent.number
    assert board.take("c", give, 9.0) is None, "two are enough"
    assert board.finish(again, 9.1) == [silent]
    assert board.num_left(item) == 0
    board.give_up(silent)
    assert board.take("c", give, 9.0) is None
    assert board.finish(silent, 9.0) is None, "it came too late"


def test_a_slow_source_loses_its_last_piece_to_one_that_is_well_faster(board: Board[str, Thing]) -> None:
    item = Thing(2)
    board.add(item)
    slow, fast = take(board, "slow", 0.0), take(board, "fast", 0.0)
    slow.got(20, 2.0)  # 8 s to come
    fast.got(100, 2.0)
    board.finish(fast, 2.0)
    assert take(board, "fast", 2.0).number == slow.number


def test_nobody_is_called_slow_before_its_time(board: Board[str, Thing]) -> None:
    """The first moments of a transfer say little about its speed."""
    item = Thing(3)
    board.add(item)
    other = take(board, "other", 0.0)
    other.got(100, 2.0)
    board.finish(other, 2.0)
    one = take(board, "one", 2.0)
    other = take(board, "other", 2.0)
    one.got(1, 2.5)
    board.finish(other, 3.9)
    assert board.take("other", give, 3.8) is None
    assert board.take("other", give, 4.0) is not None


def test_a_source_that_is_held_up_itself_takes_nothing_from_others(board: Board[str, Thing]) -> None:
    """As in a round, which slows all donors alike: what is fetched twice then is fetched in vain."""
    item = Thing(4)
    board.add(item)
    for number in range(2):
        quick = take(board, ("one", "other")[number], 0.0)
        quick.got(100, 0.2)
        board.finish(quick, 0.2)
    held_up, alike = take(board, "one", 0.2), take(board, "other", 0.2)
    held_up.got(5, 1.5)
    alike.got(5, 1.5)
    assert board.take("one", give, 1.5) is None
    alike.got(95, 1.6)
    board.finish(alike, 1.6)
    assert take(board, "other", 1.8).number == held_up.number, "who is not held up any more does"


def test_a_source_of_about_the_same_speed_does_not(board: Board[str, Thing]) -> None:
    item = Thing(2)
    board.add(item)
    one, other = take(board, "one", 0.0), take(board, "other", 0.0)
    one.got(40, 2.0)  # 3 s to come
    other.got(100, 2.0)
    board.finish(other, 2.0)
    assert board.take("other", give, 2.0) is None


def test_few_pieces_are_taken_twice(board: Board[str, Thing]) -> None:
    item = Thing(20)
    board.add(item)
    for _ in range(20):
        take(board, "frozen", 0.0)
    taken = 0
    while board.take("quick", give, 5.0):
        taken += 1
    assert taken == MAX_SECOND_TAKES


def test_what_nobody_wants_any_more_is_called_off(board: Board[str, Thing]) -> None:
    item = Thing(2)
    board.add(item)
    taken = take(board, "a", 0.0)
    assert board.drop(item) == [taken]
    assert board.finish(taken, 1.0) is None
    board.give_up(taken)
    assert board.take("a", give, 1.0) is None
    assert board.drop(item) == []


def test_every_piece_comes_in_whatever_sources_do(board: Board[str, Thing]) -> None:
    """Random sources that finish, fail, freeze and are called off: nothing is lost, nothing delivered twice."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    items = [Thing(rng.randrange(1, 6)) for _ in range(30)]
    for item in items:
        board.add(item)
    now_s, held, delivered = 0.0, [], []
    names = [f"s{number}" for number in range(5)]
    for _ in range(5000):
        now_s += rng.random()
        found = board.take(rng.choice(names), give, now_s)
        if found is not None:
            held.append(found)
        if held and rng.random() < 0.7:
            one = held.pop(rng.randrange(len(held)))
            if rng.random() < 0.6:
                off = board.finish(one, now_s)
                if off is not None:
                    delivered.append((one.item, one.number))
                for each in off or []:
                    held.remove(each)
                    board.give_up(each)
            else:
                board.give_up(one, lacks_it=rng.random() < 0.2)
                board.offers_again(one.source)
        if len(delivered) == sum(item.count for item in items):
            break
    assert len(set(delivered)) == len(delivered)
    assert {(item, number) for item in items for number in range(item.count)} == set(delivered)
