"""What rank 0 hears, all ranks of a peer hear at the same line; also what goes wrong there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from atoll.diloco.own_ranks import RANKS, part_of_rank
from atoll.diloco.ranked_member import RankedMember
from atoll.diloco.scribe import Page, Scribe
from atoll.errors import AtollError, QuorumLost, Refused
from atoll.membership.messages import CatchUp, Declare, View
from support.thread_crew import ThreadCrew, together

DECLARE = Declare((), {}, (), 0, 0, "d0", 0)
VIEW = View(1, 3, 4, ("a", "b"), True, "started")


class Told:
    """As much of a Member as rank 0 needs; `looks` are made before it is one."""

    def __init__(self, outcome: View | CatchUp | AtollError, looks: int = 0, fails: bool = False) -> None:
        self.outcome, self.looks, self.fails = outcome, looks, fails
        self.failure: AtollError | None = None
        self.stage: int | None = None
        self.session_key = b"k"

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def declare(self, message: Declare, meanwhile: Callable[[], None]) -> View | CatchUp:
        for _ in range(self.looks):
            meanwhile()
        if isinstance(self.outcome, AtollError):
            if self.fails:  # it is what the next look finds
                self.failure = self.outcome
                meanwhile()
            raise self.outcome
        return self.outcome

    def view(self) -> View:
        return VIEW

    def to_catch_up(self) -> CatchUp | None:
        return None

    def snapshot_due(self) -> int | None:
        due, self.stage = self.stage, None
        return due

    def freeze_round(self) -> int:
        return 4

    def asked_to_leave(self) -> str:
        return "tired"


def ranked(crew: ThreadCrew, told: Told) -> RankedMember:
    member: Any = told if crew.is_lead else None
    return RankedMember(crew, member)


def test_all_ranks_are_members_with_one_view() -> None:
    looks: list[int] = []

    def work(crew: ThreadCrew) -> Any:
        member = ranked(crew, Told(VIEW, looks=2))
        found = member.declare(DECLARE, lambda: looks.append(crew.rank))
        member.check()
        heard = (member.freeze_requested(4), member.freeze_requested(5), member.asked_to_leave())
        return found, member.view(), heard

    assert together(3, work) == [(VIEW, VIEW, (True, False, "tired"))] * 3
    assert sorted(looks) == [0, 0, 1, 1, 2, 2], "each rank does at a look what all do"


@pytest.mark.parametrize("fails", [True, False], ids=["found by a look", "raised by the wait"])
def test_a_refusal_is_told_once_and_the_same_on_all_ranks(fails: bool) -> None:
    def work(crew: ThreadCrew) -> Any:
        ranked(crew, Told(Refused("another lr"), looks=1, fails=fails)).declare(DECLARE)

    found = together(2, work)
    assert [(type(each), str(each)) for each in found] == [(Refused, "another lr")] * 2


def test_what_ends_membership_is_raised_on_all_ranks() -> None:
    def work(crew: ThreadCrew) -> Any:
        told = Told(VIEW)
        member = ranked(crew, told)
        member.declare(DECLARE)
        told.failure = QuorumLost("left out")
        member.check()

    assert [type(each) for each in together(2, work)] == [QuorumLost] * 2


def test_a_snapshot_is_due_once_on_every_rank() -> None:
    def work(crew: ThreadCrew) -> Any:
        told = Told(VIEW)
        member = ranked(crew, told)
        member.declare(DECLARE)
        told.stage = 7
        member.check()
        member.check()  # looked at only now
        return member.snapshot_due(), member.snapshot_due()

    assert together(2, work) == [(7, None)] * 2


def test_pages_are_written_by_all_ranks_and_one_that_cannot_is_named() -> None:
    def work(crew: ThreadCrew) -> Any:
        scribe = Scribe(crew)

        def write(page: Page) -> None:
            if crew.rank == 1 and page.path == "bad":
                raise OSError(28, "No space left on device")
            written.append((crew.rank, page.path))

        def put() -> str:
            scribe.put("wire", "good", 0)  # type: ignore[arg-type]
            try:
                scribe.put("wire", "bad", 0)  # type: ignore[arg-type]
            except OSError as error:
                return str(error)
            return "nothing was wrong"

        return scribe.together({"wire": write}, put)

    written: list[tuple[int, str]] = []
    lead, sibling = together(2, work)
    assert "rank 1: no space left on device" in lead
    assert sibling is None
    assert sorted(written) == [(0, "bad"), (0, "good"), (1, "good")]


def test_an_error_of_rank_0_ends_the_writing_on_all() -> None:
    def work(crew: ThreadCrew) -> Any:
        def fail() -> None:
            raise QuorumLost("gone")

        return Scribe(crew).together({}, fail)

    lead, sibling = together(2, work)
    assert isinstance(lead, QuorumLost)
    assert sibling is None


SAVED = {
    "inner": "i0",
    "residual": "r0",
    "inner_step": "counters",
    "scheduler": "s",
    "random": "g0",
    "data": "slots",
    RANKS: {
        "count": 2,
        "others": [{"inner": "i1", "residual": "r1", "inner_step": "counters", "random": "g1"}],
    },
}


def test_as_many_ranks_take_back_what_each_had() -> None:
    first, remark = part_of_rank(SAVED, 0, 2)
    assert (first["inner"], first["data"], remark) == ("i0", "slots", "")
    assert part_of_rank(SAVED, 1, 2)[0] == SAVED[RANKS]["others"][0]  # type: ignore[index]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_another_number_of_ranks_takes_the_counters_on_all_of_them(num_ranks: int) -> None:
    """Learning rates follow them: one sharded model must not step with two."""
    for rank in range(num_ranks):
        part, remark = part_of_rank(SAVED, rank, num_ranks)
        assert part["inner"] == ["i0", "i1"]
        assert (part["inner_step"], part["scheduler"]) == ("counters", "s")
        assert "residual" not in part
        assert ("random" in part, "data" in part) == (rank == 0, rank == 0)
        assert f"saved by 2 ranks and this peer has {num_ranks}" in remark
        assert "what the codec still owed is dropped" in remark
