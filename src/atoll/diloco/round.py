"""One round as a transaction: freeze, reduce, vote, then commit or abort.

The update is encoded once; every attempt sends those bytes. Above the commit line nothing that must survive has
changed, so an aborted attempt costs nothing. Below it every member does the same arithmetic on the same bytes, and a
contributor keeps what its bytes did not carry (`state.feedback`). A peer never steps on an unknown verdict: it waits,
for a bounded time, and then leaves. If the run went on without it, it is told to catch up instead of a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np

from atoll import kernels
from atoll.clock import Clock
from atoll.codecs.views import is_plain, value_view, wire_view
from atoll.comm.base import Communicator
from atoll.diloco.data import Data, NoData
from atoll.diloco.outer import Floats, OuterState
from atoll.diloco.round_report import Phases, RoundReport
from atoll.diloco.schedule import OuterSchedule, RoundShape
from atoll.diloco.work import Work
from atoll.errors import Diverged, QuorumLost
from atoll.kernels import Bytes
from atoll.membership.messages import Applied, CatchUp, Ready, Verdict, Vote
from atoll.plan.grid import Grid
from atoll.recovery.update import Update
from atoll.state.feedback import ErrorFeedback
from atoll.values import LinkRate, OpId, Plan, TransferStats

_SLICE_S = 0.5


class Onlooker(Protocol):
    """Who has to know what a round does (`diloco.exchange.Exchange`): it serves those who catch up."""

    def yield_to_round(self, moving: bool) -> None: ...
    def keep(self, update: Update, data: Bytes) -> None: ...
    def stage_if_due(self, state: OuterState) -> None: ...


class Nobody:
    """An onlooker for runs in one process."""

    def yield_to_round(self, moving: bool) -> None: ...
    def keep(self, update: Update, data: Bytes) -> None: ...
    def stage_if_due(self, state: OuterState) -> None: ...


class MemberPort(Protocol):
    """What a round needs of membership (`membership.client.Member`, or a stand-in in tests)."""

    def ready(self, message: Ready) -> None: ...
    def next_order(self, timeout_s: float) -> Plan | Verdict | CatchUp | None: ...
    def vote(self, message: Vote) -> None: ...
    def applied(self, message: Applied) -> None: ...


class Rounds:
    """Runs rounds for one rank. Owns the buffers of a round, so that rounds allocate nothing."""

    def __init__(
        self,
        *,
        peer: str,
        member: MemberPort,
        comm: Communicator,
        state: OuterState,
        schedule: OuterSchedule,
        grid: Grid,
        codec: str,
        clock: Clock,
        patience_s: float,
        beta: float = 0.0,
        beat: Callable[[str], None] = lambda phase: None,
        onlooker: Onlooker | None = None,
        data: Data | None = None,
    ) -> None:
        """`patience_s` bounds the whole wait from freeze to verdict; `beta` is the share of error feedback; `beat` is
        told the phase, for heartbeats; `onlooker` what moves and what is committed; `data` is what is read."""
        self._peer, self._member, self._comm, self._state = peer, member, comm, state
        self._schedule = schedule
        self._grid, self._codec, self._clock, self._patience_s = grid, codec, clock, patience_s
        self._beat = beat
        self.onlooker = onlooker or Nobody()
        self.data = data or NoData()
        self.feedback = ErrorFeedback(codec, grid.boundaries, beta)
        self._result = np.empty(grid.wire_bytes(codec), dtype=np.uint8)
        if is_plain(codec):  # the vectors themselves are what moves
            self._contribution = self._result[:0]
            self._mean: Floats = value_view(self._result)
        else:
            self._contribution = np.empty_like(self._result)
            self._mean = np.empty(grid.numel, dtype=np.float32)

    def run(self, delta: Floats, work: Work) -> RoundReport:
        """Blocks from freeze to verdict. `delta` is the pseudo-gradient (fp32, `grid.numel`); it is not changed.

        Raises QuorumLost, Unreachable, Refused or Diverged when this peer can not go on; then nothing was committed
        here that the run did not commit.
        """
        return _Attempt(self, delta, work).run()


class _Attempt:
    """The life of one round on this peer, over all its attempts."""

    def __init__(self, rounds: Rounds, delta: Floats, work: Work) -> None:
        self._r = rounds
        self._delta = delta
        self._phases = Phases()
        self._held: tuple[OpId, str] | None = None
        self._stats = TransferStats()
        self._links: tuple[LinkRate, ...] = ()
        self._attempts = 0
        started_s = rounds._clock.now_s()
        self._norm = math.sqrt(kernels.squared_norm(delta))
        finite = math.isfinite(self._norm)
        if is_plain(rounds._codec):
            self._contribution = wire_view(delta)
        else:
            self._contribution = rounds._contribution
            finite = rounds.feedback.encode(delta, self._contribution) and finite
        self._phases.encode_s = rounds._clock.now_s() - started_s
        self._ready = Ready(
            round=rounds._state.round + 1,
            version=rounds._state.version,
            digest=rounds._state.digest(),
            tokens=work.tokens,
            steps=work.steps,
            norm=self._norm if finite else 0.0,
            finite=finite,
            reads=rounds.data.reads(),
            wish=rounds.data.wish(_steps_after(rounds)),
            train_s=work.train_s,
            round_steps=_steps_after(rounds),
            update_digest=kernels.digest_bytes(self._contribution).hex() if finite else "",
        )

    def run(self) -> RoundReport:
        r = self._r
        r._beat("ready")
        r._member.ready(self._ready)
        deadline_s = r._clock.now_s() + r._patience_s
        waiting_since_s, voted = r._clock.now_s(), False
        while True:
            order = r._member.next_order(_SLICE_S)
            now_s = r._clock.now_s()
            if order is None:
                r.onlooker.stage_if_due(r._state)
                if now_s > deadline_s:
                    raise QuorumLost(
                        f"round {r._state.round + 1} got no verdict within {r._patience_s:.0f} s; "
                        "see the coordinator's log, then start this peer again"
                    )
                continue
            if voted:
                self._phases.vote_s += now_s - waiting_since_s
            else:
                self._phases.wait_s += now_s - waiting_since_s
            if isinstance(order, Verdict):
                return self._obey(order)
            if isinstance(order, CatchUp):
                return self._missed(order)
            self._reduce(order)
            waiting_since_s, voted = r._clock.now_s(), True

    def _reduce(self, plan: Plan) -> None:
        r = self._r
        r._beat("reducing")
        contributes = any(c.peer == r._peer for c in plan.contributions)
        r.onlooker.yield_to_round(True)
        try:
            report = r._comm.reduce(plan, r._grid, self._contribution if contributes else None, r._result)
        finally:
            r.onlooker.yield_to_round(False)
        self._attempts += 1
        self._stats = _added(self._stats, report.stats)
        self._links = report.stats.links
        self._phases.wire_s += report.stats.wire_s
        digest = kernels.digest_bytes(r._result).hex() if report.ok else ""
        self._held = (plan.op, digest) if report.ok else None
        r._beat("voted")
        r._member.vote(
            Vote(
                op=plan.op,
                ok=report.ok,
                digest=digest,
                broken=report.broken,
                reason=report.reason,
                stats=report.stats,
            )
        )

    def _obey(self, verdict: Verdict) -> RoundReport:
        r, state = self._r, self._r._state
        committed = verdict.outcome == "committed"
        # The run's step is a function of the verdict's round: rounds may have been skipped while this peer trained on.
        while state.round + 1 < verdict.op.round:
            state.skip(r._schedule.round_at(state.step))
        shape = r._schedule.round_at(state.step)
        if committed:
            if self._held != (verdict.op, verdict.digest):
                raise Diverged(
                    f"the run committed version {verdict.version} ({verdict.op}), for which this peer holds another "
                    "result; start it again"
                )
            started_s = r._clock.now_s()
            if not is_plain(r._codec):
                kernels.decode(r._codec, r._grid.boundaries, r._result, r._mean)
            update = self._update(verdict, shape)
            # ---- commit line: from here on every member does the same arithmetic on the same bytes ----
            state.commit(r._mean, shape)
            if not is_plain(r._codec) and any(c.peer == r._peer for c in verdict.contributions):
                r.feedback.commit(self._delta, self._contribution)
            digest = state.digest()
            self._phases.apply_s = r._clock.now_s() - started_s
            if state.version != verdict.version:
                raise Diverged(f"this peer is at version {state.version} after a commit of {verdict.version}")
            r._member.applied(Applied(version=state.version, digest=digest))
            r.onlooker.keep(update, r._result)
            if not math.isfinite(kernels.squared_norm(state.anchor)):
                raise Diverged(
                    f"the weights of version {state.version} are not finite after the outer step (lr {shape.lr:g}); "
                    "start the run again with a smaller inner.lr or outer.lr"
                )
        else:
            state.skip(shape)
            digest = self._ready.digest
        if not self._ready.finite:
            r.feedback.reset()
        r._beat("local")
        return RoundReport(
            committed=committed,
            round=verdict.op.round,
            shape=shape,
            version=state.version,
            members=verdict.members,
            contributors=tuple(c.peer for c in verdict.contributions),
            left_out=verdict.left_out.get(r._peer, ""),
            reason=verdict.reason,
            ends=verdict.ends,
            end_reason=verdict.end_reason,
            digest=digest,
            delta_norm=self._norm,
            sent_bytes=self._stats.sent_bytes,
            received_bytes=self._stats.received_bytes,
            attempts=self._attempts,
            phases=self._phases,
            weights={each.peer: each.weight for each in verdict.contributions},
            links=self._links,
            next_steps=verdict.inner_steps.get(r._peer, 0),
            saves=verdict.saves and committed,
            uploader=verdict.uploader,
            term=verdict.op.term,
        )

    def _update(self, verdict: Verdict, shape: RoundShape) -> Update:
        """What the outer step is about to read, for those who were not here."""
        r, state = self._r, self._r._state
        return Update(
            version=verdict.version,
            op=verdict.op,
            round=verdict.op.round,
            step=state.step,
            inner_steps=shape.inner_steps,
            lr=shape.lr,
            momentum=shape.momentum,
            nesterov=shape.nesterov,
            codec=r._codec,
            contributions=verdict.contributions,
            boundaries=tuple(r._grid.boundaries.tolist()),
            wire_bytes=r._result.size,
            result_digest=verdict.digest,
        )

    def _missed(self, order: CatchUp) -> RoundReport:
        r, state = self._r, self._r._state
        r._beat("catching up")
        return RoundReport(
            committed=False,
            round=state.round + 1,
            shape=r._schedule.round_at(state.step),
            version=state.version,
            members=(),
            contributors=(),
            left_out="",
            reason=order.reason,
            ends=False,
            end_reason="",
            digest=self._ready.digest,
            delta_norm=self._norm,
            sent_bytes=self._stats.sent_bytes,
            received_bytes=self._stats.received_bytes,
            attempts=self._attempts,
            phases=self._phases,
            missed=True,
        )


def _steps_after(rounds: Rounds) -> int:
    """What the schedule has for the round after the one that ends now; 0 if that is the run's last."""
    schedule, step = rounds._schedule, rounds._state.step
    step += schedule.round_at(step).inner_steps
    return 0 if schedule.finished(step) else schedule.round_at(step).inner_steps


def _added(a: TransferStats, b: TransferStats) -> TransferStats:
    return TransferStats(
        sent_bytes=a.sent_bytes + b.sent_bytes,
        received_bytes=a.received_bytes + b.received_bytes,
        wire_s=a.wire_s + b.wire_s,
        encode_s=a.encode_s + b.encode_s,
    )
