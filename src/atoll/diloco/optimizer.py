"""`DiLoCoOptimizer`: a torch.optim.Optimizer to the eye; every `inner_steps`-th step is also the outer round.

Its `param_groups` and `state` are the inner optimizer's own, so LR schedulers, clipping and gradient scaling work on
it as on the inner one. It also takes the names of OpenDiLoCo's optimizer, so that a port is an import line; see
docs/porting.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from atoll.diloco.joining import join, tensors_of
from atoll.diloco.outer_loop import OuterLoop
from atoll.diloco.round_report import RoundReport
from atoll.diloco.schedule import OuterSchedule
from atoll.diloco.session import Session
from atoll.errors import ConfigError
from atoll.membership.messages import Scalar
from atoll.state.feedback import Share
from atoll.values import CODECS

InnerSpec = torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]
Stages = Sequence[tuple[int, int]]

# OpenDiLoCo's and hivemind's names for codecs, and ours.
_CODEC_NAMES = {"none": "fp32", "uniform8bit": "int8", "blockwise8bit": "int8"}


class DiLoCoOptimizer(torch.optim.Optimizer):
    """Inner optimizer and DiLoCo's outer Nesterov step (Douillard et al. 2023, algorithm 1) behind one `step()`."""

    # Makes torch's GradScaler call step() also when it found infinities, so that attempted steps are counted.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        session: Session | None = None,
        inner_optimizer: InnerSpec | None = None,
        outer_optimizer: InnerSpec | None = None,
        *,
        inner_steps: int | Stages | None = None,
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        codec: str | None = None,
        error_feedback: Share = "auto",
        weights: str = "tokens",
        steps_by_speed: bool = False,
        late: str = "drop",
        joiner: str = "fresh",
        settings: Mapping[str, Scalar] | None = None,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        params: Iterable[Any] | None = None,
        num_inner_steps: int | None = None,
        run_id: str | None = None,
        batch_size: int | None = None,
        peers: Sequence[str] | None = None,
        all_reduce_strategy: str | None = None,
        grad_compression: str | None = None,
        timeout_waiting_for_peers: float | None = None,
        averaging_timeout: float | None = None,
        matchmaking_time: float | None = None,
        skip_load_from_peers: bool | None = None,
        allow_state_sharing: bool | None = None,
    ) -> None:
        """Declare this peer's model and settings; blocks until all of the run's `start_peers` have done so.

        `inner_steps` is the round length, or rows of (until step, inner steps) whose last row lasts to the end; all
        rows but the last only average. `inner_optimizer` and `outer_optimizer` may be instances or factories; the
        outer one must be a torch.optim.SGD without weight decay, whose numbers are taken over by Atoll's own kernel
        (other optimizers differ in the last bit between processors). `error_feedback` is the share of what the codec
        dropped that is sent again ("auto": 0.95 for stat2 and topk, else 0). `weights` is "tokens" or "equal".
        `steps_by_speed` gives slower peers fewer inner steps a round, so that nobody waits for them.
        `late` says what becomes of work that a round did not wait for: "drop", or "carry" it into the next update.
        `joiner` says what inner optimizer state a peer begins with that comes late: a "fresh" one, or a copy of a
        "donor"'s. `settings` are further values on which all peers must agree (a tokenizer's name, say).

        Raises Refused (naming the first difference), Unreachable, QuorumLost, or ConfigError.
        """
        self._owns_session = session is None
        if session is None:
            session = _join_as_opendiloco(peers, run_id, averaging_timeout)
        self.session = session
        _note_other_owner(
            all_reduce_strategy=all_reduce_strategy,
            timeout_waiting_for_peers=timeout_waiting_for_peers,
            matchmaking_time=matchmaking_time,
            skip_load_from_peers=skip_load_from_peers,
            allow_state_sharing=allow_state_sharing,
        )
        self._tokens_per_step = batch_size or 1
        try:
            self._build(
                inner_optimizer,
                outer=_outer_numbers(outer_optimizer) or (lr, momentum, nesterov),
                rounds=num_inner_steps if inner_steps is None else inner_steps,
                codec=_codec(codec or grad_compression or "int8"),
                error_feedback=error_feedback,
                weights=weights,
                steps_by_speed=steps_by_speed,
                late=late,
                joiner=joiner,
                settings=settings or {},
                named=_named(params) if params is not None else None,
            )
            self.scheduler = scheduler(self) if scheduler is not None else None
        except BaseException:
            if self._owns_session:
                session.close()
            raise
        if self.scheduler is not None:
            session.follow(self.scheduler)
        self.last_round: RoundReport | None = None

    def _build(
        self,
        inner: InnerSpec | None,
        *,
        outer: tuple[float, float, bool],
        rounds: int | Stages | None,
        codec: str,
        error_feedback: Share,
        weights: str,
        steps_by_speed: bool,
        late: str,
        joiner: str,
        settings: Mapping[str, Scalar],
        named: list[tuple[str, torch.Tensor]] | None,
    ) -> None:
        """Check the settings, declare them, and become the inner optimizer to the eye."""
        session = self.session
        self.inner_optimizer = _inner(inner or session.inner, named)
        stages = [(0, 100 if rounds is None else rounds)] if isinstance(rounds, int | None) else list(rounds)
        if weights not in ("tokens", "equal"):
            raise ConfigError(f'weights = {weights!r}: choose "tokens" or "equal"')
        if steps_by_speed and weights != "tokens":
            raise ConfigError(
                'steps_by_speed goes with weights = "tokens": peers do different work, and count by it'
            )
        if late not in ("drop", "carry"):
            raise ConfigError(f'late = {late!r}: choose "drop" or "carry"')
        if joiner not in ("fresh", "donor"):
            raise ConfigError(f'joiner = {joiner!r}: choose "fresh" or "donor"')
        for name, value in (("inner_steps", min(n for _, n in stages)), ("lr", outer[0])):
            if value <= 0:
                raise ConfigError(f"outer.{name} is {value}; it must be above 0")
        if error_feedback != "auto" and not 0 <= error_feedback <= 1:
            raise ConfigError(f'outer.error_feedback is {error_feedback}; it must be from 0 to 1, or "auto"')
        self._loop = session.open_rounds(
            OuterSchedule.of([(*row, None, None) for row in stages], *outer, total_steps=session.total_steps),
            codec=codec,
            error_feedback=error_feedback,
            late=late,
            joiner=joiner,
            settings={
                "run.steps": session.total_steps,
                "outer.inner_steps": ",".join(f"{until}:{steps}" for until, steps in stages),
                "outer.lr": outer[0],
                "outer.momentum": outer[1],
                "outer.nesterov": outer[2],
                "outer.codec": codec,
                "outer.error_feedback": error_feedback,
                "outer.weights": weights,
                "outer.steps_by_speed": steps_by_speed,
                "inner.joiner": joiner,
                **settings,
            },
            tensors=tensors_of(named, session.crew, session.mesh) if named is not None else None,
            inner=self.inner_optimizer,
        )
        self._built = False
        super().__init__(self.inner_optimizer.param_groups, self.inner_optimizer.defaults)
        self._built = True
        self._share_inner()

    def _share_inner(self) -> None:
        """Schedulers, clipping and scalers that work on this object work on the inner optimizer's groups and state."""
        self.param_groups = self.inner_optimizer.param_groups
        self.state = self.inner_optimizer.state

    # ---- what every optimizer has ---------------------------------------------------------------------------------

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        tokens: int | None = None,
        loss: float | None = None,
    ) -> Any:
        """One inner step; where the round is over, also the outer round, which blocks until its verdict.

        `tokens` is this step's weight in the mean (default: `batch_size`, else 1); `loss` is only reported. A step
        that a GradScaler skips is counted too, so that all peers end their rounds together.
        """
        value = self._inner_step(closure, scaler)
        self.last_round = (
            self._loop.step(tokens=self._tokens_per_step if tokens is None else tokens, loss=loss)
            or self.last_round
        )
        if self.scheduler is not None:
            self.scheduler.step()
        return value

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner_optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not self._built:
            return super().add_param_group(param_group)
        raise ConfigError(
            "parameters can not be added to a run under way; make the model whole before joining"
        )

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Inner optimizer, anchor, outer momentum, residual and position; with the model's own state_dict, a resumable
        whole."""
        state, residual = self._loop.state, self._loop.feedback.residual
        return {
            "inner": self.inner_optimizer.state_dict(),
            "anchor": torch.from_numpy(state.anchor).clone(),
            "velocity": torch.from_numpy(state.velocity).clone(),
            "residual": torch.from_numpy(residual).clone() if residual is not None else None,
            "version": state.version,
            "round": state.round,
            "step": state.step,
            "steps_in_round": self._loop.steps_in_round,
            "work": (self._loop.work.steps, self._loop.work.tokens),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Take back what `state_dict` gave. Raises ConfigError if it is of another version than this peer stands on,
        since members must hold the same bits."""
        state = self._loop.state
        if (state_dict["version"], state_dict["round"]) != (state.version, state.round):
            raise ConfigError(
                f"this state is of version {state_dict['version']}, the run is at version {state.version}: "
                "all members must stand on the same version; load a state that was saved at this one"
            )
        self.inner_optimizer.load_state_dict(state_dict["inner"])
        self._share_inner()
        state.anchor[:] = state_dict["anchor"].numpy()
        state.velocity[:] = state_dict["velocity"].numpy()
        if self._loop.feedback.residual is not None and state_dict["residual"] is not None:
            self._loop.feedback.residual[:] = state_dict["residual"].numpy()
        self._loop.steps_in_round = state_dict["steps_in_round"]
        self._loop.work.steps, self._loop.work.tokens = state_dict["work"]
        if self.scheduler is not None and state_dict["scheduler"] is not None:
            self.scheduler.load_state_dict(state_dict["scheduler"])

    # ---- DiLoCo's own ---------------------------------------------------------------------------------------------

    def finish_round(self) -> RoundReport:
        """End the round now, with the steps made so far (none: this peer only receives). Blocks until its verdict."""
        self.last_round = self._loop.finish_round()
        return self.last_round

    @property
    def outer(self) -> OuterLoop:
        return self._loop

    def load_state_from_peers(self) -> None:
        """OpenDiLoCo's name. A member holds the run's newest version to the bit, so there is nothing to load; raises
        what ended this peer's membership if it is no member any more."""
        self.session.safe_point()

    @property
    def local_epoch(self) -> int:
        """Rounds that this peer has passed (OpenDiLoCo's name)."""
        return self._loop.state.round

    @property
    def num_peers(self) -> int:
        return self.session.num_peers

    def shutdown(self) -> None:
        """Say goodbye and close the session if this optimizer opened it (OpenDiLoCo's name). Idempotent."""
        if self._owns_session:
            self.session.leave("shutdown", done=self._loop.finished())
            self.session.close()

    # ---- details --------------------------------------------------------------------------------------------------

    def _inner_step(self, closure: Callable[[], Any] | None, scaler: torch.amp.GradScaler | None) -> Any:
        if scaler is not None:
            if closure is not None:
                raise ConfigError(
                    "a closure can not be combined with a GradScaler (torch refuses it too); drop one"
                )
            return scaler.step(self.inner_optimizer)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None:
            if found_inf.item():
                return None
            scale = getattr(self, "grad_scale", None)
            if scale is not None:
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter.grad.div_(scale)
        if closure is None:
            return self.inner_optimizer.step()
        with torch.enable_grad():
            return self.inner_optimizer.step(closure)


def _named(params: Iterable[Any]) -> list[tuple[str, torch.Tensor]]:
    """Named parameters as they are; unnamed ones are named by their place."""
    params = list(params)
    if any(isinstance(p, dict) for p in params):
        raise ConfigError(
            "params holds parameter groups; give params=model.named_parameters() and make the groups in the inner "
            "optimizer (an instance)"
        )
    return [p if isinstance(p, tuple) else (f"parameter.{i:05d}", p) for i, p in enumerate(params)]


def _inner(spec: InnerSpec | None, named: list[tuple[str, torch.Tensor]] | None) -> torch.optim.Optimizer:
    if spec is None:
        raise ConfigError("no inner optimizer: give optimizer=... to atoll.join, or inner_optimizer=...")
    if isinstance(spec, torch.optim.Optimizer):
        return spec
    if named is None:
        raise ConfigError("an inner optimizer factory needs params=model.named_parameters()")
    return spec([tensor for _, tensor in named])


def _outer_numbers(spec: InnerSpec | None) -> tuple[float, float, bool] | None:
    """(lr, momentum, nesterov) of a torch.optim.SGD, given as an instance or a factory."""
    if spec is None:
        return None
    outer = spec if isinstance(spec, torch.optim.Optimizer) else spec([torch.nn.Parameter(torch.zeros(1))])
    group = outer.param_groups[0]
    if type(outer) is not torch.optim.SGD or group["weight_decay"] or group["dampening"] or group["maximize"]:
        raise ConfigError(
            f"outer_optimizer is {type(outer).__name__}; use torch.optim.SGD with lr, momentum and nesterov only: "
            "the outer step must give the same bits on every peer"
        )
    return group["lr"], group["momentum"], group["nesterov"]


def _codec(name: str) -> str:
    found = _CODEC_NAMES.get(name, name)
    if found not in CODECS:
        raise ConfigError(f"codec {name!r} is not known; choose one of {', '.join((*CODECS, *_CODEC_NAMES))}")
    return found


def _join_as_opendiloco(
    peers: Sequence[str] | None, run_id: str | None, averaging_timeout: float | None
) -> Session:
    if not peers or not run_id:
        raise ConfigError('give a session, or run_id="..." and peers=["host:port"] of the coordinator')
    return join(peers[0], run=run_id, wait_s=averaging_timeout or 0.0)


def _note_other_owner(**given: object) -> None:
    """These belong to the coordinator in Atoll; say so once, in one line, instead of dropping them silently."""
    names = sorted(name for name, value in given.items() if value is not None)
    if names:
        warnings.warn(
            f"{', '.join(names)}: the coordinator decides this (membership.policy, timeouts); see docs/porting.md",
            stacklevel=3,
        )
