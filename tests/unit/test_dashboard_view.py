"""The view is a fold: what a person sees follows from the events alone."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from atoll import events
from atoll.dashboard.console import EventPrinter, Goal, PlainLines, render
from atoll.dashboard.view import Seen, View, fold, fold_all
from atoll.dashboard.words import bytes_text, clock_text, number_text
from atoll.values import Edge, LinkRate
from support.made_up_run import BEGAN_S, applied, loss_at, made_up_run


def until(kind: type[events.Event], count: int = 1) -> View:
    """The view right after the `count`-th event of a kind."""
    seen = made_up_run()
    index = [i for i, each in enumerate(seen) if isinstance(each.event, kind)][count - 1]
    return fold_all(seen[: index + 1])


def printed(view: View, goal: Goal, now_s: float) -> str:
    console = Console(file=io.StringIO(), width=110, force_terminal=False)
    console.print(render(view, goal, now_s))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_whole_run() -> None:
    view = fold_all(made_up_run())
    assert {peer.name: peer.state for peer in view.peers} == {
        "peer-0": "done",
        "peer-1": "done",
        "peer-2": "killed",
    }
    assert view.rounds == 24
    assert view.last_round is not None
    assert view.last_round.members == ("peer-0", "peer-1")
    assert [validation.step for validation in view.validations] == [0, 30, 60, 90, 120, 150, 180, 210, 240]
    assert view.run == "made-up"


def test_states_follow_a_peer_through_its_life() -> None:
    assert until(events.RunStarted).peer("peer-0").state == "starting"
    assert until(events.PeerJoined, 2).peer("peer-1").state == "joined"
    assert until(events.TrainingStep).peer("peer-0").state == "training"
    assert until(events.PeerKilled).peer("peer-2").state == "killed"
    assert until(events.PeerLost).peer("peer-2").state == "killed"  # lost because it was killed


def test_syncing_while_an_attempt_is_under_way() -> None:
    attempt = events.AttemptStarted("t1/r0/f0/a0", ("peer-0", "peer-1"), ("peer-0",), "all are ready")
    view = fold(until(events.TrainingStep, 3), Seen(BEGAN_S, "coordinator", attempt))
    assert view.peer("peer-0").state == "syncing"
    assert (
        fold(view, Seen(BEGAN_S, "peer-0", applied(0, ("peer-0", "peer-1")))).peer("peer-0").state
        == "training"
    )


def test_a_lost_peer_that_was_not_killed_is_lost() -> None:
    lost = events.PeerLost("peer-1", "no heartbeat for 5.0 s", ("peer-0",))
    assert (
        fold(until(events.TrainingStep, 5), Seen(BEGAN_S, "coordinator", lost)).peer("peer-1").state == "lost"
    )


def test_folding_does_not_change_the_view_it_began_with() -> None:
    before = until(events.TrainingStep, 10)
    copy = fold_all([], before)
    fold_all(made_up_run(), before)
    assert before == copy


def test_every_event_type_can_be_folded() -> None:
    fillings = {"str": "x", "int": 1, "float": 1.0, "bool": False, "tuple[str, ...]": ("peer-0",)}
    fillings |= {
        "tuple[int, ...]": (1,),
        "float | None": None,
        "tuple[LinkRate, ...]": (LinkRate("a", "b", 1.0),),
        "tuple[Edge, ...]": (Edge("a", "b"),),
        "int | None": None,
        "dict[str, int]": {"peer-0": 8},
        "dict[str, str]": {"peer-0": "why"},
        "SlotReads": {"peer-0": ((3, 0, 0, 1, 0),)},
    }
    for kind in events.event_types().values():
        fields = [fillings[kind.__annotations__[name]] for name in kind.__struct_fields__]
        view = fold(View(), Seen(BEGAN_S, "peer-0", kind(*fields)))
        assert isinstance(printed(view, Goal(60, 100), BEGAN_S), str)


def test_the_screen_shows_peers_round_progress_and_news() -> None:
    view = until(events.PeerLost)
    assert view.started_at_s is not None
    text = printed(view, Goal(60, 10**6), view.started_at_s + 45)
    assert "peer-2" in text
    assert "killed" in text
    assert "75% 0:15 left" in text
    assert "round 11 of 3 peers: compute 2.50 s, wait 0.20 s, wire 0.06 s, apply 0.04 s, 480 kB" in text
    assert f"validation loss {loss_at(120) - 0.1:.3f} (at the start 5.600)" in text
    assert "peer-2 was killed (SIGKILL), on purpose" in text


def test_the_plan_of_a_round_stands_beside_its_seconds() -> None:
    began = fold(View(), Seen(BEGAN_S, "coordinator", _attempt(4)))
    view = fold(began, Seen(BEGAN_S, "peer-0", applied(4, ("peer-0",))))
    assert "(ring, 1.25 s planned), apply" in printed(view, Goal(60, 100), BEGAN_S)
    late = fold(
        fold(began, Seen(BEGAN_S, "coordinator", _attempt(5))),
        Seen(BEGAN_S, "peer-0", applied(4, ("peer-0",))),
    )
    assert "planned" not in printed(late, Goal(60, 100), BEGAN_S)


def _attempt(number: int) -> events.AttemptStarted:
    return events.AttemptStarted(f"t1/r{number}/f0/a0", ("peer-0",), ("peer-0",), "all", "ring", 1.25)


def test_progress_by_time_or_by_steps() -> None:
    view = until(events.TrainingStep, 100)
    began_s = view.started_at_s
    assert began_s is not None
    assert Goal(60, 10**6).progress(view, began_s + 30) == (0.5, pytest.approx(30.0))
    slowest = min(peer.step for peer in view.peers)
    share, left_s = Goal(0, 2 * slowest).progress(view, began_s + 10)
    assert share == 0.5
    assert left_s == pytest.approx(10.0)
    assert Goal(60, 100).progress(View(), BEGAN_S) == (0.0, 60)
    assert Goal(60, 10**6).progress(view, began_s + 100)[0] == 1.0


def test_plain_lines_tell_each_round_once() -> None:
    console = Console(file=io.StringIO(), width=40, highlight=False)
    lines, view = PlainLines(console), View()
    for seen in made_up_run():
        view = fold(view, seen)
        lines.show(view, [seen])
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.count(" committed by ") == 24
    assert text.count("validation loss") == 9
    assert "round 3 committed by 3 peers at step 40: loss" in text


def test_a_peer_prints_its_own_steps_and_rounds() -> None:
    console = Console(file=io.StringIO(), width=40, highlight=False)
    printer = EventPrinter(console)
    printer(BEGAN_S, "peer-1", events.TrainingStep(10, 3.25, 512, 12_345.0, 3e-3, 0.5))
    printer(BEGAN_S, "peer-1", applied(0, ("peer-0", "peer-1")))
    assert isinstance(console.file, io.StringIO)
    first, second = console.file.getvalue().splitlines()
    assert first == "step 10: loss 3.250, 12.3k tokens/s, lr 3.00e-03, gradient norm 0.50"
    assert "round 0 committed by 2 peers" in second


def test_numbers_as_people_read_them() -> None:
    assert [bytes_text(n) for n in (0, 999, 1000, 480_000, 11_500_000)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "480 kB",
        "11.5 MB",
    ]
    assert [number_text(n) for n in (950, 12_345, 3_456_789)] == ["950", "12.3k", "3.46M"]
    assert [clock_text(s) for s in (-1, 5, 65, 3661)] == ["0:00", "0:05", "1:05", "1:01:01"]
    assert math.isfinite(loss_at(0))
