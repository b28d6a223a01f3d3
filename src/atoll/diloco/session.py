"""A peer's seat in a run: `atoll.join(...)`, and what a training loop asks of it.

Joining proves the run's token. The peer declares its model and settings when the optimizer is made (or the trainer
built), and blocks there until all `start_peers` are in. All calls are on the training thread; the threads underneath
belong to `membership.client` and to the engine, and end with `close()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

import torch

from atoll.clock import Clock, MonotonicClock
from atoll.comm.native import NativeCommunicator
from atoll.diloco.outer import OuterState
from atoll.diloco.outer_loop import OuterLoop
from atoll.diloco.round import Rounds
from atoll.diloco.schedule import OuterSchedule
from atoll.errors import ConfigError
from atoll.events import EventLog, RunEnded
from atoll.membership.client import Admission, Member
from atoll.membership.messages import Declare, Scalar, View
from atoll.network.addresses import EngineAddress
from atoll.plan.grid import Grid
from atoll.state.tensors import ModelTensors
from atoll.values import OpId, Range, RankInfo

Batch = TypeVar("Batch")
MOST_ATTEMPTS = 20
"""membership.max_attempts is at most this (config.schema); the coordinator decides, peers only bound their wait."""


class EngineSlot:
    """The engine, once there is one. Membership's thread tells it of aborts and of a new session key."""

    def __init__(self) -> None:
        self.comm: NativeCommunicator | None = None

    def abort(self, op: OpId) -> None:
        if self.comm is not None:
            self.comm.abort(op)

    def renew_key(self, session_key: bytes) -> None:
        if self.comm is not None:
            self.comm.set_session_key(session_key)

    def close(self) -> None:
        if self.comm is not None:
            self.comm.close()


class Session:
    """A peer's seat in a run, from connect to goodbye. Use it in a `with` statement."""

    def __init__(
        self,
        *,
        run: str,
        peer: str,
        member: Member,
        admission: Admission,
        slot: EngineSlot,
        engine: EngineAddress,
        tensors: ModelTensors | None,
        inner: torch.optim.Optimizer | None,
        total_steps: int | None,
        events: EventLog,
        close_sinks: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        self.run, self.peer, self.inner, self.total_steps = run, peer, inner, total_steps
        self.admission = admission
        self.events = events
        self._member, self._slot, self._engine, self._tensors = member, slot, engine, tensors
        self._close_sinks = close_sinks
        self._clock = clock or MonotonicClock()
        self._loop: OuterLoop | None = None
        self._followed: list[Any] = []
        self._start_members: tuple[str, ...] = ()
        self._exhausted = False
        self._closed = False

    # ---- opening -----------------------------------------------------------------------------------------------

    def open_rounds(
        self,
        schedule: OuterSchedule,
        *,
        codec: str,
        settings: Mapping[str, Scalar],
        tensors: ModelTensors | None = None,
        inner: torch.optim.Optimizer | None = None,
    ) -> OuterLoop:
        """Declare the model and the settings, and wait until the run starts. Called once, by the optimizer or trainer.

        Raises Refused (naming the first difference), Unreachable, QuorumLost, or ConfigError.
        """
        tensors = tensors or self._tensors
        if tensors is None:
            raise ConfigError("no model: give model=... to atoll.join, or params=... to DiLoCoOptimizer")
        if self._loop is not None:
            raise ConfigError("this session already has an optimizer; one session trains one model")
        self.inner = inner or self.inner
        state = OuterState(tensors.read())
        grid = Grid.of(tensors.layout.sizes)
        comm = self._open_engine()
        rounds = Rounds(
            peer=self.peer,
            member=self._member,
            comm=comm,
            state=state,
            schedule=schedule,
            grid=grid,
            codec=codec,
            clock=self._clock,
            patience_s=_patience_s(self.admission),
            beat=lambda phase: self._member.progress(self.step, phase),
        )
        declared = Declare(
            layout=tensors.layout.parameters,
            settings={**settings, "model.frozen": tensors.frozen_digest()},
            ranks=(RankInfo(self._engine.advertise, comm.port, (Range(0, grid.numel),)),),
            version=state.version,
            round=state.round,
            digest=state.digest(),
            step=state.step,
        )
        self._start_members = tuple(sorted(self._member.declare(declared).members))
        self._loop = OuterLoop(
            tensors=tensors,
            state=state,
            rounds=rounds,
            schedule=schedule,
            clock=self._clock,
            freeze_requested=self._member.freeze_requested,
            progress=lambda step: self._member.progress(step, "local"),
            emit=self.events.emit,
        )
        self._loop.on_reset = self._reset_inner
        self._loop.on_jump = self._advance_followed
        self._member.progress(state.step, "local")
        return self._loop

    def _open_engine(self) -> NativeCommunicator:
        self._slot.comm = comm = NativeCommunicator(
            run=self.run,
            peer=self.peer,
            rank=0,
            session_key=self.admission.session_key,
            bind_host=self._engine.bind,
            port=self._engine.port,
            connect_timeout_s=self.admission.timeouts.connect_s,
        )
        return comm

    # ---- asked by training loops ---------------------------------------------------------------------------------

    @property
    def loop(self) -> OuterLoop:
        if self._loop is None:
            raise ConfigError("no optimizer yet: make atoll.DiLoCoOptimizer(session, ...) first")
        return self._loop

    @property
    def step(self) -> int:
        """The run's inner step, the same on all peers at a round's end; 0 before the optimizer is made."""
        return self._loop.run_step if self._loop else 0

    @property
    def version(self) -> int:
        """How many rounds the run has committed, as far as this peer holds them."""
        return self._loop.state.version if self._loop else 0

    @property
    def members(self) -> tuple[str, ...]:
        """Peer ids of the members as last heard, sorted."""
        return tuple(sorted(self._member.view().members))

    @property
    def start_members(self) -> tuple[str, ...]:
        """Peer ids of the members as the run started, sorted: what data is shared out by. () before that."""
        return self._start_members

    @property
    def num_peers(self) -> int:
        return len(self.members)

    def view(self) -> View:
        """The membership as last heard from the coordinator. Does not block."""
        return self._member.view()

    def safe_point(self) -> tuple[str, ...]:
        """The one line where the world may change. Raises what ended this peer's membership; returns the members."""
        self._member.check()
        return self.members

    def finished(self) -> bool:
        """True once all steps that were asked for are committed, or the run's time is over."""
        return self._loop is not None and self._loop.finished()

    def follow(self, scheduler: Any) -> None:
        """Keep an inner LR scheduler at the run's step when that jumps (join, early end of a round).

        Between jumps call `scheduler.step()` after `optimizer.step()`, as in plain PyTorch.
        """
        self._followed.append(scheduler)
        self._advance(scheduler, self.step)

    def batches(self, dataset: Iterable[Batch], *, shard: bool = True) -> Iterator[Batch]:
        """This peer's batches, until the run is finished or the data is exhausted.

        With `shard`, batch i of the dataset goes to peer i mod num_peers (in the order of their ids, as the run
        started); all peers must then iterate in the same order. With a number of steps the dataset is repeated. Work
        of an unfinished round is committed before the last batch's turn ends.
        """
        members = self.start_members
        index, count = (members.index(self.peer), len(members)) if shard else (0, 1)
        while not self.finished():
            seen = 0
            for number, batch in enumerate(dataset):
                if self.finished():
                    return
                if number % count == index:
                    seen += 1
                    self.safe_point()
                    yield batch
            if self.total_steps is None or not seen:
                self._exhausted = True
                break
        if self._loop is not None and not self.finished() and self._loop.work.steps:
            self._loop.finish_round()

    # ---- leaving ---------------------------------------------------------------------------------------------------

    def leave(self, reason: str, *, done: bool) -> None:
        """Say goodbye: the others do not wait for a timeout. Blocks at most 2 s."""
        self._member.leave(reason, done)

    def close(self) -> None:
        """End threads and sockets. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._slot.close()
        self._member.close()
        self._close_sinks()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        code = (
            0 if error is None else int(getattr(error, "exit_code", 130 if kind is KeyboardInterrupt else 1))
        )
        done, reason = (False, str(error) or type(error).__name__) if error is not None else self._goodbye()
        try:
            self.leave(reason, done=done)
            self.events.emit(RunEnded(reason=reason, exit_code=code))
        finally:
            self.close()

    # ---- details -----------------------------------------------------------------------------------------------------

    def _goodbye(self) -> tuple[bool, str]:
        """Whether this peer did what it was asked for, and why it leaves, when its loop ended without an error."""
        if self._loop is not None and self._loop.ended:
            return True, self._loop.ended
        if self.finished():
            return True, f"all {self.total_steps} steps are committed"
        if self._exhausted:
            return True, "its own data is exhausted"
        return self.total_steps is None, f"its loop ended at step {self.step}"

    def _reset_inner(self) -> None:
        if self.inner is not None:
            self.inner.state.clear()

    def _advance_followed(self) -> None:
        for scheduler in self._followed:
            self._advance(scheduler, self.step - 1)

    @staticmethod
    def _advance(scheduler: Any, step: int) -> None:
        while scheduler.last_epoch < step:
            scheduler.step()


def _patience_s(admission: Admission) -> float:
    """The longest that a round may keep this peer waiting: the slowest member, then every attempt and its votes."""
    t = admission.timeouts
    before = t.ready_wait_s + t.grace_s + t.freeze_s + t.quorum_wait_s + t.coordinator_lost_s
    return before + MOST_ATTEMPTS * (t.attempt_s + 2 * t.vote_s)
