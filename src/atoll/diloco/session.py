"""A peer's seat in a run: `atoll.join(...)`, and what a training loop asks of it.

Joining proves the run's token. The peer declares its model and settings when the optimizer is made (or the trainer
built), and blocks there until all `start_peers` are in. All calls are on the training thread; the threads underneath
belong to `membership.client` and to the engine, and end with `close()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import torch

from atoll.checkpoint.own_part import Stateful
from atoll.clock import Clock, MonotonicClock
from atoll.comm.native import NativeCommunicator
from atoll.comm.prober import ProbeOrder, Prober
from atoll.diloco.data import Data, NoData
from atoll.diloco.exchange import Exchange, Shelf
from atoll.diloco.outer import OuterState
from atoll.diloco.outer_loop import OuterLoop
from atoll.diloco.round import Rounds
from atoll.diloco.safekeeping import LAST_SAVE_S, Safekeeping
from atoll.diloco.schedule import OuterSchedule
from atoll.errors import ConfigError, QuorumLost, Unreachable
from atoll.events import EventLog, RunEnded
from atoll.membership.client import Admission, Member
from atoll.membership.leases import Reads, SlotTable
from atoll.membership.messages import CatchUp, Declare, Probe, Probed, Scalar, View
from atoll.mesh.elastic import ElasticDeviceMesh, PeerSet
from atoll.network.addresses import EngineAddress
from atoll.network.line import Line
from atoll.plan.grid import Grid
from atoll.recovery.pursuit import UNUSABLE
from atoll.signals import Manners
from atoll.state.feedback import Share, chosen_beta
from atoll.state.inner_state import InnerState
from atoll.state.tensors import ModelTensors
from atoll.values import OpId, Range, RankInfo

Batch = TypeVar("Batch")
_OWN_BYTES = 12
"""About what a save has of a peer's own for each parameter: AdamW's two moments, and a residual."""
MOST_ATTEMPTS = 20
"""membership.max_attempts is at most this (config.schema); the coordinator decides, peers only bound their wait."""


_BY_SIGNAL = 128
_HURRY_S = 0.5
"""A peer that is told to end does not wait for its last save: the writer finishes it alone."""


class EngineSlot:
    """The engine, its prober and the exchange, once there are any. Membership's thread tells them of aborts, of a new
    session key, that others catch up, and that links are to be measured."""

    def __init__(self) -> None:
        self.comm: NativeCommunicator | None = None
        self.prober: Prober | None = None
        self.exchange: Exchange | None = None

    def abort(self, op: OpId) -> None:
        if self.comm is not None:
            self.comm.abort(op)

    def renew_key(self, session_key: bytes) -> None:
        if self.comm is not None:
            self.comm.set_session_key(session_key)
        if self.exchange is not None:
            self.exchange.renew_key(session_key)

    def serve(self) -> None:
        if self.exchange is not None:
            self.exchange.serve()

    def probe(self, order: Probe) -> None:
        if self.prober is not None:
            self.prober.begin(ProbeOrder(order.targets, order.num_bytes, order.connections, order.link_s))

    def close(self) -> None:
        if self.comm is not None:
            self.comm.close()
        if self.prober is not None:
            self.prober.close()
        if self.exchange is not None:
            self.exchange.close()


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
        line: Line | None = None,
        shelf: Shelf | None = None,
        safekeeping: Safekeeping | None = None,
        model: torch.nn.Module | None = None,
        manners: Manners | None = None,
        close_sinks: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        self.run, self.peer, self.inner, self.total_steps = run, peer, inner, total_steps
        self.admission = admission
        self.events = events
        self._member, self._slot, self._engine, self._tensors = member, slot, engine, tensors
        self._line, self._shelf = line or Line(), shelf or Shelf()
        self.safekeeping = safekeeping or Safekeeping(None, run=run, peer=peer, emit=events.emit, fresh=False)
        self._model = model
        self._manners = manners
        self._close_sinks = close_sinks
        self._clock = clock or MonotonicClock()
        self._loop: OuterLoop | None = None
        self._followed: list[Any] = []
        self._start_members: tuple[str, ...] = ()
        self.joined_late = False
        self.mesh = ElasticDeviceMesh()
        self._exhausted = False
        self._closed = False

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
        state = OuterState(tensors.read())
        resumed = self.safekeeping.resume(state)
        if not resumed and not holds_start:
            state.version = UNUSABLE
        data = data or NoData()
        slots = self._saved_slots(state.version) if data.num_slots else None
        grid = Grid.of(tensors.layout.sizes)
        comm = self._open_engine()
        give = self.inner if joiner == "donor" else None
        exchange = self._open_exchange(grid.numel, InnerState(give, tensors) if give is not None else None)
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
            beta=chosen_beta(codec, error_feedback),
            beat=self._beat,
            onlooker=exchange,
            data=data,
        )
        declared = Declare(
            layout=tensors.layout.parameters,
            settings={**settings, "model.frozen": tensors.frozen_digest()},
            ranks=(self._rank(comm.port, exchange.port, grid.numel),),
            version=state.version,
            round=state.round,
            digest=state.digest(),
            step=state.step,
            term=self.safekeeping.term,
            version_term=self.safekeeping.term,
            num_slots=data.num_slots,
            wish=data.wish(0 if schedule.finished(state.step) else schedule.round_at(state.step).inner_steps),
            slots=slots,
            own_data=data.own_data,
        )
        view = self._member.declare(declared, lambda: exchange.stage_if_due(state))
        if isinstance(view, CatchUp):
            view = exchange.catch_up(state) if resumed else exchange.join(state)
            self.joined_late = True
        if resumed or self.joined_late:
            tensors.write(state.anchor)
        data.begin()
        self._start_members = tuple(sorted(view.members))
        self._loop = OuterLoop(
            tensors=tensors,
            state=state,
            rounds=rounds,
            schedule=schedule,
            clock=self._clock,
            freeze_requested=self._member.freeze_requested,
            progress=lambda step: self._beat("local"),
            emit=self.events.emit,
            missed=lambda: self._member.to_catch_up() is not None,
            catch_up=exchange.catch_up,
            carry=late == "carry",
        )
        self._loop.on_reset = self._reset_inner
        self._loop.on_jump = self._advance_followed
        self._open_safekeeping(exchange, self._loop, tensors)
        self._beat("local")
        return self._loop

    def _open_safekeeping(self, exchange: Exchange, loop: OuterLoop, tensors: ModelTensors) -> None:
        self.safekeeping.open(exchange.staging, loop, tensors.layout)
        if self.inner is not None:
            self.safekeeping.hold_stateful("inner", self.inner)
        feedback = loop.feedback
        if feedback.residual is not None:
            self.safekeeping.hold("residual", lambda: feedback.residual, feedback.restore)
        if self._model is not None:
            self.hold_buffers(self._model)

    def _saved_slots(self, version: int) -> SlotTable | None:
        """How far the data was read, as this peer's part or that of another one tells, best of all of this version.
        Saved again with every version from now on."""
        saved: list[Any] = list(self.safekeeping.others("data").values())
        self.safekeeping.hold("data", self._slots_to_save, saved.append)
        known: list[SlotTable] = []
        for each in saved:
            try:
                known += [msgspec.convert(each, SlotTable)] if each else []
            except msgspec.ValidationError as error:
                self.safekeeping.remark(f"what was saved of data does not fit and is dropped: {error}")
        return max((each for each in known if each.version <= version), key=_version_of, default=None)

    def _slots_to_save(self) -> Any:
        slots = self._member.slots()
        return msgspec.to_builtins(slots) if slots is not None else None

    def _rank(self, port: int, sidecar_port: int, numel: int) -> RankInfo:
        return RankInfo(
            host=self._engine.advertise,
            port=port,
            ranges=(Range(0, numel),),
            max_up=self._line.max_up,
            max_down=self._line.max_down,
            sidecar_port=sidecar_port,
        )

    def _open_exchange(self, numel: int, inner: InnerState | None) -> Exchange:
        self._slot.exchange = Exchange(
            run=self.run,
            peer=self.peer,
            member=self._member,
            admission=self.admission,
            bind_host=self._engine.bind,
            shelf=self._shelf,
            line=self._line,
            emit=self.events.emit,
            inner=inner,
            own_bytes=_OWN_BYTES * numel if self.safekeeping.saves else 0,
        )
        return self._slot.exchange

    def _open_engine(self) -> NativeCommunicator:
        try:
            self._slot.comm = NativeCommunicator(
                run=self.run,
                peer=self.peer,
                rank=0,
                session_key=self.admission.session_key,
                bind_host=self._engine.bind,
                port=self._engine.port,
                connect_timeout_s=self.admission.timeouts.connect_s,
                progress_timeout_s=self.admission.timeouts.progress_timeout_s,
                congestion=self._line.congestion,
                max_up_bytes_per_s=self._line.max_up,
                max_down_bytes_per_s=self._line.max_down,
            )
        except ValueError as error:
            raise ConfigError(f"net.congestion: {error}") from None
        self._slot.prober = Prober(
            self.peer, self._slot.comm, lambda links, failed: self._member.probed(Probed(links, failed))
        )
        return self._slot.comm

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
        saved = model.state_dict(keep_vars=True)
        buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
        if buffers:
            self.safekeeping.hold("buffers", lambda: buffers, lambda held: _copy_into(buffers, held))

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
        self.mesh.close()
        self._slot.close()
        self._member.close()
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
        done, reason = (False, str(error) or type(error).__name__) if error is not None else self._goodbye()
        try:
            if error is None and self._loop is not None and self._loop.finished():
                self.safekeeping.finish(self._loop)
            elif isinstance(error, QuorumLost | Unreachable) and self._loop is not None:
                self.safekeeping.part(self._loop)
            self.leave(reason, done=done)
            self.safekeeping.close(LAST_SAVE_S if code < _BY_SIGNAL else _HURRY_S)
            self.events.emit(RunEnded(reason=reason, exit_code=code))
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


def _version_of(slots: SlotTable) -> int:
    return slots.version


def _copy_into(buffers: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(held[name])


def _patience_s(admission: Admission) -> float:
    """The longest that a round may keep this peer waiting: the slowest member, then every attempt and its votes."""
    t = admission.timeouts
    before = t.ready_wait_s + t.grace_s + t.freeze_s + t.quorum_wait_s + t.coordinator_lost_s
    return before + MOST_ATTEMPTS * (t.attempt_s + 2 * t.vote_s)
