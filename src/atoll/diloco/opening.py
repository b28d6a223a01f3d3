"""How a session's rounds begin: engine and sidecar open, the peer declares, and starts with the run or catches up.

Done once, on the training thread, by `Session.open_rounds`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from atoll import log
from atoll.clock import Clock
from atoll.diloco.badge import Badge
from atoll.diloco.data import Data
from atoll.diloco.engine_slot import EngineSlot
from atoll.diloco.exchange import Exchange, Shelf
from atoll.diloco.outer import OuterState
from atoll.diloco.outer_loop import OuterLoop
from atoll.diloco.own_parts import hold_slots
from atoll.diloco.ranked_member import AnyMember
from atoll.diloco.round import Rounds
from atoll.diloco.safekeeping import Safekeeping
from atoll.diloco.schedule import OuterSchedule
from atoll.errors import ConfigError
from atoll.events import AddressDoubted, EventLog, InnerStateMissed
from atoll.membership.client import Admission
from atoll.membership.differences import layout_difference
from atoll.membership.leases import SlotTable
from atoll.membership.messages import CatchUp, Declare, Scalar
from atoll.mesh.crew import Crew
from atoll.network.addresses import EngineAddress, seen_from_outside
from atoll.network.line import Line
from atoll.plan.grid import Grid
from atoll.plan.memory import own_part_bytes
from atoll.recovery.pursuit import UNUSABLE
from atoll.state.feedback import Share, chosen_beta
from atoll.state.inner_state import InnerState
from atoll.state.tensors import ModelTensors
from atoll.values import ParameterInfo, Range, RankInfo

_log = log.get(__name__)

MOST_ATTEMPTS = 20
"""membership.max_attempts is at most this (config.schema); the coordinator decides, peers only bound their wait."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A peer that is in the run: its loop, the members as it came in, and whether it came late."""

    loop: OuterLoop
    exchange: Exchange
    members: tuple[str, ...]
    joined_late: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a session has when it is made, and its rounds are opened with. `beat` is told the phase, for heartbeats."""

    run: str
    peer: str
    member: AnyMember
    crew: Crew
    admission: Admission
    slot: EngineSlot
    engine: EngineAddress
    line: Line
    shelf: Shelf
    safekeeping: Safekeeping
    events: EventLog
    clock: Clock
    beat: Callable[[str], None]
    badge: Badge | None = None

    def open(
        self,
        schedule: OuterSchedule,
        *,
        codec: str,
        error_feedback: Share,
        late: str,
        joiner: str,
        holds_start: bool,
        settings: Mapping[str, Scalar],
        tensors: ModelTensors,
        inner: torch.optim.Optimizer | None,
        data: Data,
    ) -> Opened:
        """As `Session.open_rounds` says. Blocks until this peer is in the run."""
        crew = self.crew
        self._compare_ranks(tensors)
        state = OuterState(
            tensors.read(), tensors.ranges, numel=tensors.layout.numel, sum_tables=crew.sum_tables
        )
        resumed = self.safekeeping.resume(state)
        if not resumed and not holds_start:
            state.version = UNUSABLE
        slots = (
            hold_slots(self.safekeeping, state.version, data.num_slots, self.member.slots)
            if data.num_slots
            else None
        )
        grid = Grid.of(tensors.layout.sizes)
        comm = self.slot.open_engine(
            run=self.run,
            peer=self.peer,
            member=self.member,
            admission=self.admission,
            engine=self.engine,
            line=self._own_line(),
            rank=crew.rank,
            tls=self.badge.tls if self.badge else None,
        )
        give = inner if joiner == "donor" and self._can_give_inner() else None
        beta = chosen_beta(codec, error_feedback)
        exchange = self._open_exchange(
            own_part_bytes(grid.numel, feedback=beta > 0) if self.safekeeping.saves else 0,
            InnerState(give, tensors) if give is not None else None,
        )
        # It may have changed since this peer was admitted, when there was nobody here to be told.
        self.slot.renew_key(self.member.session_key)
        ranks = tuple(crew.share(RankInfo, self._rank(comm.port, exchange.port, tensors.ranges)))
        rounds = Rounds(
            peer=self.peer,
            member=self.member,
            comm=comm,
            state=state,
            schedule=schedule,
            grid=grid,
            codec=codec,
            clock=self.clock,
            patience_s=_patience_s(self.admission),
            beta=beta,
            beat=self.beat,
            onlooker=exchange,
            data=data,
            crew=crew,
            ranks=ranks,
        )
        declared = self._declaration(state, schedule, settings, tensors, ranks, data, slots)
        view = self.member.declare(declared, lambda: exchange.stage_if_due(state))
        joined_late = isinstance(view, CatchUp)
        if isinstance(view, CatchUp):
            view = exchange.catch_up(state) if resumed else exchange.join(state)
        if resumed or joined_late:
            tensors.write(state.anchor)
        data.begin()
        loop = OuterLoop(
            tensors=tensors,
            state=state,
            rounds=rounds,
            schedule=schedule,
            clock=self.clock,
            freeze_requested=self.member.freeze_requested,
            progress=lambda step: self.beat("local"),
            emit=self.events.emit,
            missed=lambda: self.member.to_catch_up() is not None,
            catch_up=exchange.catch_up,
            carry=late == "carry",
            hear=self.member.check if crew.num_ranks > 1 else (lambda: None),
            crew=crew,
        )
        return Opened(loop, exchange, tuple(sorted(view.members)), joined_late)

    def _open_exchange(self, own_bytes: int, inner: InnerState | None) -> Exchange:
        self.slot.exchange = Exchange(
            run=self.run,
            peer=self.peer,
            member=self.member,
            admission=self.admission,
            bind_host=self.engine.bind,
            port=self.engine.sidecar_port,
            shelf=self.shelf,
            line=self.line,
            emit=self.events.emit,
            inner=inner,
            own_bytes=own_bytes,
            crew=self.crew,
            identity=self.badge.identity if self.badge else None,
        )
        return self.slot.exchange

    def _compare_ranks(self, tensors: ModelTensors) -> None:
        """Raises ConfigError, on all ranks, if they do not hold the same model."""
        if len(set(self.crew.share(str, tensors.layout_digest()))) == 1:
            return
        layouts = self.crew.share(tuple[ParameterInfo, ...], tensors.layout.parameters)
        first, *others = ({each.name: each for each in layout} for layout in layouts)
        for rank, other in enumerate(others, start=1):
            if reason := layout_difference(first, other, f"rank {rank}"):
                break
        else:
            reason = "they freeze or shard other parameters"
        raise ConfigError(
            f"the ranks of {self.peer} hold different models: {reason}; build the same model on all of them"
        )

    def _can_give_inner(self) -> bool:
        if self.crew.num_ranks == 1:
            return True
        why = f"{self.peer} has {self.crew.num_ranks} ranks, each with a part of it (inner.joiner = donor)"
        self.events.emit(InnerStateMissed(reason=why))
        return False

    def _own_line(self) -> Line:
        """This rank's share of the peer's line."""
        ranks = self.crew.num_ranks
        return Line(-(-self.line.max_up // ranks), -(-self.line.max_down // ranks), self.line.congestion)

    def _rank(self, port: int, sidecar_port: int, ranges: tuple[Range, ...]) -> RankInfo:
        line, engine = self._own_line(), seen_from_outside(self.engine, self.admission.seen_as)
        if self.crew.is_lead:
            for doubt in engine.doubts:
                _log.warning("%s", doubt)
                self.events.emit(AddressDoubted(address=", ".join(engine.hosts), reason=doubt))
        return RankInfo(
            host=engine.advertise,
            port=port,
            ranges=ranges,
            max_up=line.max_up,
            max_down=line.max_down,
            sidecar_port=sidecar_port,
            more_hosts=engine.more,
        )

    def _declaration(
        self,
        state: OuterState,
        schedule: OuterSchedule,
        settings: Mapping[str, Scalar],
        tensors: ModelTensors,
        ranks: tuple[RankInfo, ...],
        data: Data,
        slots: SlotTable | None,
    ) -> Declare:
        return Declare(
            layout=tensors.layout.parameters,
            settings={**settings, "model.frozen": tensors.frozen_digest()},
            ranks=ranks,
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


def _patience_s(admission: Admission) -> float:
    """The longest that a round may keep this peer waiting: the slowest member, then every attempt and its votes."""
    t = admission.timeouts
    before = t.ready_wait_s + t.grace_s + t.freeze_s + t.quorum_wait_s + t.coordinator_lost_s
    return before + MOST_ATTEMPTS * (t.attempt_s + 2 * t.vote_s)
