"""What is told about training: step events, the anchor's validation loss, the final model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from atoll.clock import Clock
from atoll.diloco.round_report import RoundReport
from atoll.diloco.session import Session
from atoll.errors import LocalError
from atoll.events import AnchorEvaluated, ModelSaved, TrainingStep
from atoll.train.inner import StepReport
from atoll.train.metrics import ThroughputMeter


class Observer:
    """Turns reports into events. The first member (by id) evaluates and saves; if it is lost, the next one does. All of
    its ranks take part."""

    def __init__(
        self,
        session: Session,
        *,
        evaluate: Callable[[], float],
        eval_tokens: int,
        every_rounds: int,
        log_every: int,
        clock: Clock,
    ) -> None:
        """`evaluate` gives the loss (nats per token) of the weights as they are; called where they are the anchor."""
        self._session, self._evaluate, self._eval_tokens = session, evaluate, eval_tokens
        self._every_rounds, self._log_every, self._clock = every_rounds, log_every, clock
        self._evaluated_version = -1
        self._steps = 0
        self._meter = ThroughputMeter(window_s=10.0)
        self._meter.start(clock.now_s())

    def started(self) -> None:
        """Evaluate the start weights."""
        self._evaluate_anchor()

    def after_step(self, report: StepReport, sync: RoundReport | None) -> None:
        self._steps += 1
        self._meter.add(report.tokens, self._clock.now_s())
        if self._steps % self._log_every == 0 or sync is not None or report.skipped:
            self._session.events.emit(
                TrainingStep(
                    step=self._session.step,
                    loss=report.loss,
                    tokens=report.tokens,
                    tokens_per_s=self._meter.tokens_per_s(),
                    lr=report.lr,
                    grad_norm=report.grad_norm,
                    skipped=report.skipped,
                )
            )
        if sync is not None:
            self.after_round(sync)

    def after_round(self, sync: RoundReport) -> None:
        """A round has ended, with a step or without one."""
        if sync.committed and self._every_rounds and sync.version % self._every_rounds == 0:
            self._evaluate_anchor()

    def finished(self, gather: Callable[[], dict[str, torch.Tensor]], path: Path | None) -> None:
        """Evaluate the final anchor and write it to `path` (safetensors, whole or not at all). `gather` gives rank 0
        the whole weights."""
        self._evaluate_anchor()
        if path is None or not self._leads():
            return
        digest = self._session.loop.state.digest()
        tensors = gather()
        if self._session.crew.is_lead:
            self._save(tensors, path, digest)

    def _leads(self) -> bool:
        return self._session.members[:1] == (self._session.peer,)

    def _evaluate_anchor(self) -> None:
        version = self._session.version
        if not self._leads() or version == self._evaluated_version:
            return
        self._evaluated_version = version
        self._session.events.emit(
            AnchorEvaluated(
                step=self._session.step, version=version, val_loss=self._evaluate(), tokens=self._eval_tokens
            )
        )

    def _save(self, tensors: dict[str, torch.Tensor], path: Path, digest: str) -> None:
        draft = path.with_suffix(".draft")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, draft, {"format": "pt"})
            draft.replace(path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise LocalError(
                f"cannot write {path}: {error.strerror or error}; free some space or set local.out"
            ) from None
        self._session.events.emit(ModelSaved(path=str(path), version=self._session.version, digest=digest))
