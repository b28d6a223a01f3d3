"""The one loop. Nothing else drives training: no hook, callback or thread trains, syncs or changes weights."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.diloco.outer_loop import OuterLoop
from atoll.diloco.session import Session
from atoll.train.batches import Batch
from atoll.train.inner import InnerStep
from atoll.train.observer import Observer


def train(
    session: Session, inner: InnerStep, batches: Iterator[Batch], outer: OuterLoop, observer: Observer
) -> None:
    """Train until the run is over. Raises what ends this peer's part in it."""
    while not session.finished():
        session.safe_point()  # what ended membership is raised here; joins and recovery will happen here
        batch = next(batches)
        report = inner.step(
            batch.inputs, batch.targets, session.step
        )  # forward, backward, clip, local optimizer
        outer.work.positions = batch.positions
        sync = outer.step(tokens=0 if report.skipped else report.tokens, loss=report.loss)  # None, except at the end of a round
        observer.after_step(report, sync)  # events, evaluation of the anchor
