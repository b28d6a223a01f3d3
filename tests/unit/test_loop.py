"""The one loop, with stand-ins around it: what a peer does that has nothing to read."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.clock import MonotonicClock
from atoll.diloco.round_report import RoundReport
from atoll.diloco.schedule import RoundShape
from atoll.events import AnchorEvaluated, Event
from atoll.train.loop import train
from atoll.train.observer import Observer


@dataclass
class StandIn:
    """A session and its outer loop: rounds that all commit, until the fourth."""

    peer: str = "a"
    members: tuple[str, ...] = ("a", "b")
    version: int = 0
    told: list[Event] = field(default_factory=list)

    @property
    def events(self) -> StandIn:
        return self

    @property
    def step(self) -> int:
        return 10 * self.version

    def emit(self, event: Event) -> None:
        self.told.append(event)

    def finished(self) -> bool:
        return self.version == 4

    def safe_point(self) -> tuple[str, ...]:
        return self.members

    def finish_round(self) -> RoundReport:
        self.version += 1
        return RoundReport(
            committed=True,
            round=self.version,
            shape=RoundShape(10, 0.7, 0.9, True),
            version=self.version,
            members=self.members,
            contributors=("b",),
            left_out="",
            reason="",
            ends=False,
            end_reason="",
            digest="",
            delta_norm=0.0,
            sent_bytes=0,
            received_bytes=0,
            attempts=1,
        )

    def take(self) -> None:
        """As a source: nothing is left."""


def test_the_first_member_evaluates_although_it_has_nothing_to_read() -> None:
    run = StandIn()
    observer = Observer(
        run,  # type: ignore[arg-type]
        evaluate=lambda: 1.0 / run.version,
        eval_tokens=7,
        every_rounds=2,
        log_every=1,
        clock=MonotonicClock(),
    )
    train(run, None, run, run, observer)  # type: ignore[arg-type]
    assert run.told == [
        AnchorEvaluated(step=20, version=2, val_loss=0.5, tokens=7),
        AnchorEvaluated(step=40, version=4, val_loss=0.25, tokens=7),
    ]
