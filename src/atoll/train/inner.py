"""The inner step: forward, backward, clip, local optimizer. Each call of `InnerStep.step` is one of the run.

It runs on the training thread, and costs what the same lines cost in a bare PyTorch loop
(`benchmarks/inner_overhead.py`): loss and gradient norm are read back together, once a step.

Where the peer has several ranks, all of them take the step together, each with its own rows of the peer's batch. What
is reported, and what is decided by it, is the peer's and the same on every rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.errors import LocalError
from atoll.train.autocast import autocast_context
from atoll.train.gradients import Gradients
from atoll.train.masters import Masters
from atoll.train.model import LanguageModel
from atoll.train.ranks import ALONE, Ranks

LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One attempted inner step. `loss` is nats per token over the peer's whole batch, which has `tokens`; `seconds` is
    what the step took.

    `grad_norm` is the global norm before clipping. `skipped`: loss or gradient was not finite, and neither
    weights nor optimizer state were touched; it counts as a step all the same, so that peers stay in step.
    """

    loss: float
    tokens: int
    grad_norm: float
    lr: float
    seconds: float
    skipped: bool
    clipped: bool

    @property
    def trained_tokens(self) -> int:
        """What the step counts for in the mean: nothing if it was skipped."""
        return 0 if self.skipped else self.tokens


class InnerStep:
    """Owns how a batch becomes one step of `optimizer`. Others may read `model` and `optimizer`."""

    def __init__(
        self,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        schedule: Callable[[int], float],
        *,
        clip_norm: float = 0.0,
        micro_batch: int = 0,
        device: torch.device | str = "cpu",
        autocast: bool = False,
        compile: bool = False,
        ranks: Ranks = ALONE,
        loss: LossFunction | None = None,
    ) -> None:
        """`schedule` maps the run's step to a learning rate. `clip_norm` 0: never clip.

        `micro_batch`: sequences at once on each rank, 0 for all of its rows. `autocast`: bf16 where `device` has it.
        `compile`: run the loss through `torch.compile`. `loss`: what is trained on, if not `model.loss` alone; it is
        what reports say.
        """
        self.model = model
        self.optimizer = optimizer
        self.attempted_steps = 0
        self.skipped_steps = 0
        self.masters: Masters | None = None
        self._rewarms_until = self._rewarm_steps = 0
        self._schedule = schedule
        self._clip_norm = clip_norm if clip_norm > 0 else math.inf
        self._micro_batch = micro_batch
        self._device = torch.device(device)
        self._autocast = autocast_context(self._device, autocast)
        loss = loss or model.loss
        self._loss = compiled(loss) if compile else loss
        self._ranks = ranks
        self._gradients = Gradients(list(model.parameters()), ranks)
        model.train()

    def step(self, inputs: Tensor, targets: Tensor, run_step: int) -> StepReport:
        """Train on one batch of token ids [B, T] as step `run_step` (counted from 0 by the run, not here).

        The batch is the peer's, and the same on all its ranks; each trains on B / ranks rows of it. Every target
        is a token; the gradient is that of the mean over all of them, whatever the micro-batch.
        Raises LocalError if the model was to be compiled and this machine cannot.
        """
        started = time.perf_counter()
        lr = self._schedule(run_step) * self._rewarming()
        for group in self.optimizer.param_groups:
            group["lr"] = lr

        own = [self._ranks.own_rows(each).to(self._device, torch.long) for each in (inputs, targets)]
        loss, grad_norm = self._gradients.measure(self._accumulate(*own))

        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        clipped = finite and grad_norm > self._clip_norm
        if clipped:
            self._gradients.clip(self._clip_norm, grad_norm)
        if finite:
            self.optimizer.step()
            self.weights_changed()
        self.optimizer.zero_grad()

        self.attempted_steps += 1
        self.skipped_steps += not finite
        return StepReport(
            loss=loss,
            tokens=targets.numel(),
            grad_norm=grad_norm,
            lr=lr,
            seconds=time.perf_counter() - started,
            skipped=not finite,
            clipped=clipped,
        )

    def state_dict(self) -> dict[str, int]:
        """What counts steps here; the optimizer has its own state."""
        return {
            "attempted_steps": self.attempted_steps,
            "skipped_steps": self.skipped_steps,
            "rewarms_until": self._rewarms_until,
            "rewarm_steps": self._rewarm_steps,
        }

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self.attempted_steps = state_dict["attempted_steps"]
        self.skipped_steps = state_dict["skipped_steps"]
        self._rewarms_until = state_dict["rewarms_until"]
        self._rewarm_steps = state_dict["rewarm_steps"]

    def weights_changed(self) -> None:
        """Bring the bf16 copies up to date, if the model has such. Called here, and after an outer step."""
        if self.masters is not None:
            self.masters.publish()

    def rewarm(self, steps: int) -> None:
        """The optimizer knows nothing yet of a model that is trained already: the learning rate rises over so many
        steps to the run's own."""
        self._rewarms_until = self.attempted_steps + steps
        self._rewarm_steps = steps

    def _rewarming(self) -> float:
        left = self._rewarms_until - self.attempted_steps
        return 1.0 if left <= 0 else 1 - left / (self._rewarm_steps + 1)

    def _accumulate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Leave the gradient of the mean over all tokens in `.grad`; return that mean, on the device."""
        if not 0 < self._micro_batch < len(inputs):
            return self._backward(inputs, targets, 1.0)
        parts = zip(inputs.split(self._micro_batch), targets.split(self._micro_batch), strict=True)
        return torch.stack([self._backward(x, y, len(x) / len(inputs)) for x, y in parts]).sum()

    def _backward(self, inputs: Tensor, targets: Tensor, share: float) -> Tensor:
        with self._autocast:
            loss = self._loss(inputs, targets)
        if share != 1.0:
            loss = loss * share
        loss.backward()
        if self.masters is not None:
            self.masters.collect()
        return loss.detach()


def compiled(loss: LossFunction) -> LossFunction:
    """`loss` through `torch.compile`. The first call compiles, or raises LocalError where that is impossible.

    The method is compiled, not the module: parameter names stay as they are, and evaluation stays plain.
    """
    from torch._dynamo.exc import TorchDynamoException  # a second's import, paid only by who compiles

    fast = torch.compile(loss)

    def call(inputs: Tensor, targets: Tensor) -> Tensor:
        try:
            return fast(inputs, targets)
        except TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            raise LocalError(
                f"torch.compile failed on this machine: {reason}; set local.compile = false"
            ) from error

    return call
