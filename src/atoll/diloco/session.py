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

from atoll.checkpoint.own_part import Stateful
from atoll.clock import Clock, MonotonicClock
from atoll.diloco.badge import Badge
from atoll.diloco.data import Data, NoData
from atoll.diloco.engine_slot import EngineSlot
from atoll.diloco.exchange import Shelf
from atoll.diloco.opening import Opening
from atoll.diloco.outer_loop import OuterLoop
from atoll.diloco.own_parts import hold_buffers, hold_training
from atoll.diloco.ranked_member import AnyMember
from atoll.diloco.safekeeping import LAST_SAVE_S, Safekeeping
from atoll.diloco.schedule import OuterSchedule
from atoll.errors import ConfigError, QuorumLost, SiblingLost, Unreachable
from atoll.events import EventLog, RunEnded
from atoll.membership.client import Admission
from atoll.membership.leases import Reads, SlotTable
from atoll.membership.messages import Scalar, View
from atoll.mesh.crew import Crew
from atoll.mesh.elastic import ElasticDeviceMesh, PeerSet
from atoll.network.addresses import EngineAddress
from atoll.network.line import Line
from atoll.signals import Manners
from atoll.state.feedback import Share
from atoll.state.tensors import ModelTensors

Batch = TypeVar("Batch")
_BY_SIGNAL = 128
_HURRY_S = 0.5
"""A peer that is told to end does not wait for its last save: the writer finishes it alone."""


class Session:
    """A peer's seat in a run, from connect to goodbye. Use it in a `with` statement."""

    def __init__(
        self,
        *,
        run: str,
        peer: str,
        member: AnyMember,
        admission: Admission,
        slot: EngineSlot,
        engine: EngineAddress,
        tensors: ModelTensors | None,
        inner: torch.optim.Optimizer | None,
        total_steps: int | None,
        events: EventLog,
        line: Line | None = None,
        shelf: Shelf | None = None,
        safekeeping: Safekeeping | None = None,
        model: torch.nn.Module | None = None,
        manners: Manners | None = None,
        close_sinks: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
        crew: Crew | None = None,
        mesh: ElasticDeviceMesh | None = None,
        badge: Badge | None = None,
    ) -> None:
        self.crew = crew or Crew.alone()
        self.run, self.peer, self.inner, self.total_steps = run, peer, inner, total_steps
        self.admission = admission
        self.events = events
        self._member, self._slot, self._tensors = member, slot, tensors
        self.safekeeping = safekeeping or Safekeeping(None, run=run, peer=peer, emit=events.emit, fresh=False)
        self._model = model
        self._manners = manners
        self._close_sinks = close_sinks
        self._opening = Opening(
            run=run,
            peer=peer,
            member=member,
            crew=self.crew,
            admission=admission,
            slot=slot,
            engine=engine,
            line=line or Line(),
            shelf=shelf or Shelf(),
            safekeeping=self.safekeeping,
            events=events,
            clock=clock or MonotonicClock(),
            beat=self._beat,
            badge=badge,
        )
        self._loop: OuterLoop | None = None
        self._followed: list[Any] = []
        self._start_members: tuple[str, ...] = ()
        self.joined_late = False
        self.mesh = mesh or ElasticDeviceMesh()
        self._exhausted = False
        self._closed = False
        self._error: BaseException | None = None

    # ---- opening -----------------------------------------------------------------------------------------------

    def open_rounds(
        self,
        schedule: OuterSchedule,
        *,
        codec: str,
        error_feedback: Share = "auto",
        late: str = "drop",
        joiner: str = "fresh",
        holds_start: bool = True,
        settings: Mapping[str, Scalar],
        tensors: ModelTensors | None = None,
        inner: torch.optim.Optimizer | None = None,
        data: Data | None = None,
    ) -> OuterLoop:
        """Declare the model and the settings, and wait until the run starts; if it is under way, catch up with it.
        Called once, by the optimizer or trainer. `error_feedback` "auto": the codec's own share. `late` "carry": work
        that a round did not wait for is part of the next update, not dropped. `joiner` "donor": this peer, if it comes
        late, begins with a member's inner optimizer state, and gives its own to those who come after it. Without
        `holds_start` the model's weights are not the run's, not even at its start: all of the state comes from others.
        `data` reads what the coordinator leases to this peer.

        Raises Refused (naming the first difference), Unreachable, QuorumLost, or ConfigError.
        """
        tensors = tensors or self._tensors
        if tensors is None:
            raise ConfigError("no model: give model=... to atoll.join, or params=... to DiLoCoOptimizer")
        if self._loop is not None:
            raise ConfigError("this session already has an optimizer; one session trains one model")
        self.inner = inner or self.inner
        opened = self._opening.open(
            schedule,
            codec=codec,
            error_feedback=error_feedback,
            late=late,
            joiner=joiner,
            holds_start=holds_start,
            settings=settings,
            tensors=tensors,
            inner=self.inner,
            data=data or NoData(),
        )
        self.joined_late, self._start_members = opened.joined_late, opened.members
        self._loop = opened.loop
        self._loop.on_reset = self._reset_inner
        self._loop.on_jump = self._advance_followed
        self.safekeeping.open(opened.exchange, self._loop, tensors.layout)
        hold_training(self.safekeeping, self._loop, self.inner, self.crew.rank)
        if self._model is not None:
            self.hold_buffers(self._model)
        self._beat("local")
        return self._loop

    # ---- asked by training loops ---------------------------------------------------------------------------------

    @property
    def loop(self) -> OuterLoop:
        if self._loop is None:
            raise ConfigError("no optimizer yet: make atoll.DiLoCoOptimizer(session, ...) first")
        return self._loop

    @property
    def took_inner_state(self) -> bool:
        """Whether this peer came late and began with a donor's inner optimizer state."""
        return self._slot.exchange is not None and self._slot.exchange.took_inner

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
        """The one line where the world may change: here a peer that the run left behind catches up, and snapshots are
        staged for others. Raises what ended this peer's membership; returns the members."""
        self._member.check()
        if self._loop is not None and self._slot.exchange is not None:
            self._slot.exchange.stage_if_due(self._loop.state)
            if self._member.to_catch_up() is not None:
                self._loop.catch_up()
            self.safekeeping.safe_point(self._loop)
        self._replace_peers()
        return self.mesh.peers.ids

    def _replace_peers(self) -> None:
        last = self._loop.last_commit if self._loop is not None else None
        self.mesh.replace_peers(
            PeerSet(
                ids=self.members,
                version=self.version,
                weights=last.weights if last else {},
                rates=last.links if last else (),
            )
        )

    def finished(self) -> bool:
        """True once all steps that were asked for are committed, the run is over, or this peer was asked to leave."""
        return self._loop is not None and (self._loop.finished() or bool(self.asked_to_leave))

    @property
    def asked_to_leave(self) -> str:
        """Why an operator wishes this peer to leave (`atoll leave`), "" if none does. The others go on without it."""
        return self._member.asked_to_leave()

    def follow(self, scheduler: Any) -> None:
        """Keep an inner LR scheduler at the run's step when that jumps (join, early end of a round).

        Between jumps call `scheduler.step()` after `optimizer.step()`, as in plain PyTorch.
        """
        self._followed.append(scheduler)
        self._advance(scheduler, self.step)

    def hold(self, name: str, each: Stateful) -> None:
        """Save this with every checkpoint, and give it its state back now if this run goes on from one: a GradScaler,
        a sampler, a scheduler that does not follow the run's step. Call it once the optimizer is made."""
        self.safekeeping.hold_stateful(name, each)

    def hold_buffers(self, model: torch.nn.Module) -> None:
        """Save the model's persistent buffers: no other peer has them."""
        hold_buffers(self.safekeeping, model)

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

    # ---- leased data ---------------------------------------------------------------------------------------------

    def slots(self) -> SlotTable | None:
        """Positions in the data and leases, as last heard from the coordinator."""
        return self._member.slots()

    def want_slots(self, more: int) -> bool:
        """Ask for more data slots within a round. Blocks until the coordinator has answered, at most `dead_s`: it may
        be gone, and this peer can go on with what it holds."""
        return self._member.want_slots(more, self.admission.timeouts.dead_s)

    def read_for_good(self, peer: str, reads: Reads, wish: int) -> None:
        """The coordinator knows it from the verdict."""

    # ---- leaving ---------------------------------------------------------------------------------------------------

    def leave(self, reason: str, *, done: bool) -> None:
        """Say goodbye: the others do not wait for a timeout. Blocks at most 2 s."""
        self._member.leave(reason, done)

    def close(self) -> None:
        """End threads and sockets. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.safekeeping.close(_HURRY_S)
        self._slot.close()
        self._member.close()
        self.crew.close(self._error)
        self.mesh.close(lost=self._error is not None)
        self._close_sinks()
        if self._manners is not None:
            self._manners.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        code = (
            0 if error is None else int(getattr(error, "exit_code", 130 if kind is KeyboardInterrupt else 1))
        )
        if self._manners is not None:
            self._manners.leaving()
        self._error = error
        parts = isinstance(error, QuorumLost | Unreachable)  # of which all ranks heard at the same line
        if error is not None and not parts:
            self.crew.tell_end(error)  # before anything that waits: the others may be in the middle of a step
        done, reason = (False, str(error) or type(error).__name__) if error is not None else self._goodbye()
        try:
            if error is None and self._loop is not None and self._loop.finished():
                self.safekeeping.finish(self._loop)
            elif parts and self._loop is not None:
                self.safekeeping.part(self._loop)
            self.leave(reason, done=done)
            hurries = code >= _BY_SIGNAL or isinstance(error, SiblingLost)
            self.safekeeping.close(_HURRY_S if hurries else LAST_SAVE_S)
            self.events.emit(RunEnded(reason=reason, exit_code=code))
        except BaseException as later:
            self._error = self._error or later
            raise
        finally:
            self.close()

    # ---- details -----------------------------------------------------------------------------------------------------

    def _goodbye(self) -> tuple[bool, str]:
        """Whether this peer did what it was asked for, and why it leaves, when its loop ended without an error."""
        if self._loop is not None and self._loop.finished():
            return True, self._loop.ended or f"all {self.total_steps} steps are committed"
        if self.asked_to_leave:
            return False, self.asked_to_leave
        if self._exhausted:
            return True, "its own data is exhausted"
        return self.total_steps is None, f"its loop ended at step {self.step}"

    def _beat(self, phase: str) -> None:
        """What the next heartbeats tell."""
        loop = self._loop
        made, of = (loop.steps_in_round, loop.own_steps) if loop else (0, 0)
        self._member.progress(self.step, phase, made, of)

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
