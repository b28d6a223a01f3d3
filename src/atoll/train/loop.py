"""The one loop. Nothing else drives training: no hook, callback or thread trains, syncs or changes weights."""

from __future__ import annotations

from typing import Protocol

from atoll.diloco.outer_loop import OuterLoop
from atoll.diloco.session import Session
from atoll.train.batches import Batch
from atoll.train.inner import InnerStep
from atoll.train.observer import Observer


class Source(Protocol):
    """Where batches come from."""

    def take(self) -> Batch | None: ...


def train(session: Session, inner: InnerStep, batches: Source, outer: OuterLoop, observer: Observer) -> None:
    """Train until the run is over. Raises what ends this peer's part in it."""
    while not session.finished():
        session.safe_point()  # raises what ended membership; joins and recovery will happen here and nowhere else
        if (batch := batches.take()) is None:
            # nothing is left to read: this peer takes part without an update
            observer.after_round(outer.finish_round())
            continue
        # forward, backward, clip, local optimizer
        report = inner.step(batch.inputs, batch.targets, session.step)
        # None, except at the end of a round
        sync = outer.step(tokens=report.trained_tokens, loss=report.loss)
        # events, evaluation of the anchor
        observer.after_step(report, sync)
