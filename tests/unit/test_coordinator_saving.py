"""Which versions the verdicts name for saving: by rounds, by the coordinator's clock, and always the last."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from atoll.membership import coordinator
from atoll.membership.messages import Declare, Ready, Reduce, Verdict, Vote
from atoll.membership.operator import StopRun
from atoll.membership.settings import CoordinatorSettings
from atoll.membership.steps import (
    CoordinatorEvent,
    Journal,
    JournalRecord,
    OperatorSaid,
    PeerArrived,
    PeerSaid,
    Send,
    Tick,
)
from atoll.values import Range, RankInfo, TransferStats
from support.fake_peer import LAYOUT, SETTINGS, make_lanes


@dataclass
class Desk:
    """A coordinator with one lone peer that commits a round a call."""

    settings: CoordinatorSettings
    records: list[JournalRecord] = field(default_factory=list)
    now_s: float = 0.0
    verdicts: list[Verdict] = field(default_factory=list)
    version: int = 0

    def __post_init__(self) -> None:
        self._start()

    def _start(self) -> None:
        begun = coordinator.start(self.settings, self.records, b"k", None, self.now_s)
        self.state = begun.state
        self._process = f"process-{len(self.records)}"
        self.hear(PeerArrived("a", self._process, "1.2.3.4"))
        declared = Declare(
            layout=LAYOUT,
            settings=SETTINGS,
            ranks=(RankInfo("1.2.3.4", 5, (Range(0, 6),)),),
            version=self.version,
            round=self.version,
            digest=f"d{self.version}",
            step=0,
        )
        self.say(declared)

    def hear(self, event: CoordinatorEvent) -> list[Any]:
        step = coordinator.step(self.state, event, self.now_s, make_lanes=make_lanes)
        self.state = step.state
        self.records += [each.record for each in step.effects if isinstance(each, Journal)]
        sent = [each.message for each in step.effects if isinstance(each, Send)]
        self.verdicts += [each for each in sent if isinstance(each, Verdict)]
        return sent

    def say(self, message: Any) -> list[Any]:
        return self.hear(PeerSaid("a", self._process, message))

    def commit(self, after_s: float = 1.0) -> Verdict:
        for _ in range(int(after_s * 4)):
            self.now_s += 0.25
            self.hear(Tick())
        number = self.state.round.number
        ready = Ready(
            round=number,
            version=self.version,
            digest=f"d{self.version}",
            tokens=1,
            steps=1,
            norm=1.0,
            finite=True,
        )
        (plan,) = [each.plan for each in self.say(ready) if isinstance(each, Reduce)]
        self.say(Vote(op=plan.op, ok=True, digest="r", broken=(), reason="", stats=TransferStats()))
        self.version += 1
        return self.verdicts[-1]

    def restart(self) -> None:
        self._start()


def named(desk: Desk, count: int, after_s: float = 1.0) -> list[int]:
    return [verdict.version for _ in range(count) if (verdict := desk.commit(after_s)).saves]


def test_every_third_version() -> None:
    desk = Desk(CoordinatorSettings(run="run", save_rounds=3))
    assert named(desk, 7) == [3, 6]
    assert {verdict.uploader for verdict in desk.verdicts} == {"a"}


def test_by_the_coordinators_clock() -> None:
    assert named(Desk(CoordinatorSettings(run="run", save_s=2.5)), 9) == [3, 6, 9]


@pytest.mark.parametrize("settings", [{"save_s": 2.5}, {"save_rounds": 3}])
def test_a_coordinator_that_starts_again_keeps_the_rhythm(settings: dict[str, Any]) -> None:
    desk = Desk(CoordinatorSettings(run="run", **settings))
    assert named(desk, 4) == [3]
    desk.restart()
    assert named(desk, 3) == [6]


def test_never_if_it_is_off() -> None:
    desk = Desk(CoordinatorSettings(run="run"))
    assert named(desk, 5) == []
    assert {verdict.uploader for verdict in desk.verdicts} == {""}


def test_the_last_commit_of_a_run_that_is_stopped() -> None:
    desk = Desk(CoordinatorSettings(run="run", save_rounds=100))
    assert named(desk, 2) == []
    desk.hear(OperatorSaid(1, StopRun("enough")))
    assert named(desk, 1) == [3]
    assert desk.verdicts[-1].ends
