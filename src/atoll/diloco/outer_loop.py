"""Counts inner steps and, where a round ends, runs the round and adopts the new anchor.

Both the trainer and `DiLoCoOptimizer` drive training through this one class, on the training thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from atoll.clock import Clock
from atoll.diloco.outer import OuterState
from atoll.diloco.round import Rounds
from atoll.diloco.round_report import RoundReport
from atoll.diloco.schedule import OuterSchedule, RoundShape
from atoll.diloco.work import Work
from atoll.errors import Diverged, QuorumLost
from atoll.events import Event, RoundApplied
from atoll.mesh.crew import Crew
from atoll.state.feedback import ErrorFeedback
from atoll.state.tensors import ModelTensors


class OuterLoop:
    """One peer's outer optimization. `step` is called once after every inner step."""

    def __init__(
        self,
        *,
        tensors: ModelTensors,
        state: OuterState,
        rounds: Rounds,
        schedule: OuterSchedule,
        clock: Clock,
        freeze_requested: Callable[[int], bool],
        progress: Callable[[int], None],
        emit: Callable[[Event], None],
        missed: Callable[[], bool] = lambda: False,
        catch_up: Callable[[OuterState], object] = lambda state: None,
        carry: bool = False,
        hear: Callable[[], None] = lambda: None,
        crew: Crew | None = None,
    ) -> None:
        """With several ranks all of them call the methods here at the same line, and `hear` tells each what rank 0 has
        heard by then. `missed` says whether the run went on without this peer; `catch_up` brings the state to the
        newest version, however long that takes. With `carry`, work that the run did not wait for is not dropped, but
        part of the next update."""
        self.state = state
        self.schedule = schedule
        self.work = Work()
        self.ended = ""
        self._tensors, self._rounds, self._clock = tensors, rounds, clock
        self._freeze_requested, self._progress, self._emit = freeze_requested, progress, emit
        self._missed, self._catch_up, self._carry = missed, catch_up, carry
        self._hear, self._crew = hear, crew or Crew.alone()
        self._delta = np.empty_like(state.anchor)
        self.last_commit: RoundReport | None = None
        self._steps_in_round = 0
        self._shape = schedule.round_at(state.step)
        self._own_steps = self._shape.inner_steps
        self._started_s = clock.now_s()
        self.on_reset: Callable[[], None] = lambda: None
        self.on_jump: Callable[[], None] = lambda: None

    @property
    def run_step(self) -> int:
        """The run's inner step: what learning-rate schedules go by."""
        return self.state.step + min(self._steps_in_round, self._shape.inner_steps)

    @property
    def feedback(self) -> ErrorFeedback:
        """What the codec dropped so far, and what is owed of it."""
        return self._rounds.feedback

    @property
    def round_shape(self) -> RoundShape:
        """The round that is under way."""
        return self._shape

    @property
    def own_steps(self) -> int:
        """How many inner steps this peer makes in it: fewer than the round has, if it is slower than others and the
        run goes by speed."""
        return self._own_steps

    @property
    def steps_in_round(self) -> int:
        """Inner steps since the round began; settable, to go on from a saved state."""
        return self._steps_in_round

    @steps_in_round.setter
    def steps_in_round(self, steps: int) -> None:
        self._begin_round(steps_made=steps)

    def finished(self) -> bool:
        return bool(self.ended) or self.schedule.finished(self.state.step)

    def step(self, *, tokens: int = 1, loss: float | None = None) -> RoundReport | None:
        """Count one inner step (attempted ones count too). Runs the round if it is due; else returns None."""
        self.work.add(tokens, loss)
        self._steps_in_round += 1
        self._progress(self.run_step)
        self._hear()
        self._rounds.onlooker.stage_if_due(self.state)
        if self._missed():
            self.work.train_s += self._clock.now_s() - self._started_s
            self.catch_up()
            return None
        if self._steps_in_round >= self._own_steps or self._freeze_requested(self.state.round + 1):
            return self.finish_round()
        return None

    def finish_round(self) -> RoundReport:
        """End the round now, with the steps made so far (none: this peer only receives). Blocks until its verdict; if
        the run went on without this peer, until it has caught up (then the report says `missed`)."""
        compute_s = self._clock.now_s() - self._started_s
        early = self._steps_in_round < self._shape.inner_steps
        self.work.train_s += compute_s
        self._tensors.subtract_from(self.state.anchor, self._delta)
        report = self._rounds.run(self._delta, self.work)
        if report.missed:
            self.catch_up()
            return report
        work = self.work
        if work.steps and self._crew.decide(bool, lambda: work.bad_losses == work.steps):
            raise Diverged(
                f"none of the {self.work.steps} inner steps since version {report.version} had a finite loss; "
                "start again with a smaller inner.lr, or look for bad rows in the data"
            )
        adopting_s = self._clock.now_s()
        if report.ends:
            self.ended = report.end_reason or report.reason
        lost = not report.committed and self.finished()
        if report.committed or report.left_out or lost:
            self._tensors.write(self.state.anchor)
        if report.left_out and not math.isfinite(report.delta_norm):
            self.on_reset()
        report.phases.apply_s += self._clock.now_s() - adopting_s
        self._record(report, compute_s)
        if report.committed:
            self.last_commit = report
        if report.committed or report.left_out:
            self.work = Work()
            self._rounds.data.settle()
        else:
            self._rounds.data.go_on()
        if lost and not report.ends:
            raise QuorumLost(
                f"the run's last round was not committed, so its steps since version {self.state.version} are not in "
                f"the model: {report.reason}"
            )
        self._begin_round(own_steps=report.next_steps)
        self._rounds.onlooker.stage_if_due(
            self.state
        )  # a joiner need not wait for the first inner step as well
        if early:
            self.on_jump()
        self._progress(self.run_step)
        self._started_s = self._clock.now_s()
        return report

    def catch_up(self) -> None:
        """The run went on without this peer: fetch what it lacks, and begin anew from the newest anchor.

        Its steps since the last commit are dropped, and what they read is read again. With `carry` they are kept while
        nothing but commits was missed, and what they read is still leased to this peer:
        local weights move as the anchor did, so the next update spans both (late = carry).
        """
        before = self.state.anchor.copy() if self._carry and self.work.steps else None
        version = self.state.version
        self._catch_up(self.state)
        carried = before is not None and self.state.version > version
        if before is not None and carried and self._crew.decide(bool, self._rounds.data.is_unbroken):
            local = self._tensors.read()
            local += self.state.anchor - before
            self._tensors.write(local)
            self._rounds.data.go_on()
        else:
            self._tensors.write(self.state.anchor)
            self.work = Work()
            self._rounds.data.begin()
        self._begin_round()
        self.on_jump()
        self._progress(self.run_step)
        self._started_s = self._clock.now_s()

    def _begin_round(self, steps_made: int = 0, own_steps: int = 0) -> None:
        """`own_steps` 0: as many as the schedule says."""
        self._steps_in_round = steps_made
        if not self.finished():
            self._shape = self.schedule.round_at(self.state.step)
        self._own_steps = min(own_steps or self._shape.inner_steps, self._shape.inner_steps)

    def _record(self, report: RoundReport, compute_s: float) -> None:
        phases = report.phases
        if not report.committed:
            return
        self._emit(
            RoundApplied(
                round=report.round,
                version=report.version,
                step=self.state.step,
                inner_steps=self.work.steps,
                members=report.members,
                contributors=report.contributors,
                tokens=self.work.tokens,
                mean_loss=self.work.mean_loss if self.work.losses else None,
                compute_s=compute_s,
                wait_s=phases.wait_s,
                encode_s=phases.encode_s,
                wire_s=phases.wire_s,
                vote_s=phases.vote_s,
                apply_s=phases.apply_s,
                sent_bytes=report.sent_bytes,
                received_bytes=report.received_bytes,
                delta_norm=report.delta_norm,
                outer_lr=report.shape.lr,
                outer_momentum=report.shape.momentum,
                digest=report.digest,
            )
        )
