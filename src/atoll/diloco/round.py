"""One round as a transaction: freeze, reduce, vote, then commit or abort.

The update is encoded once; every attempt sends those bytes. Above the commit line nothing that must survive has
changed, so an aborted attempt costs nothing. Below it every member does the same arithmetic on the same bytes, and a
contributor keeps what its bytes did not carry (`state.feedback`). A peer never steps on an unknown verdict: it waits,
for a bounded time, and then leaves. If the run went on without it, it is told to catch up instead of a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from atoll import kernels
from atoll.clock import Clock
from atoll.codecs.views import is_plain, value_view, wire_view
from atoll.comm.base import Communicator
from atoll.comm.digests import combined_digest, route_digests
from atoll.diloco.data import Data, NoData
from atoll.diloco.outer import Floats, OuterState
from atoll.diloco.round_ports import MemberPort, Nobody, Onlooker
from atoll.diloco.round_ranks import FrozenRank, ReducedRank, added, report_of_peer
from atoll.diloco.round_report import Phases, RoundReport
from atoll.diloco.schedule import OuterSchedule, RoundShape
from atoll.diloco.work import Work
from atoll.errors import Diverged, QuorumLost
from atoll.membership.messages import Applied, CatchUp, Ready, Verdict, Vote
from atoll.mesh.crew import Crew
from atoll.plan.grid import Grid
from atoll.plan.routes import Routing, routing, routing_of
from atoll.recovery.update import Update
from atoll.state.feedback import ErrorFeedback
from atoll.values import LinkRate, OpId, Plan, Range, RankInfo, ReduceReport, TransferStats

_SLICE_S = 0.5


class Rounds:
    """Runs rounds for one rank. Owns the buffers of a round, so that rounds allocate nothing; only where the members
    are cut otherwise than in the last round, the buffers are others (`plan.routes`)."""

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
        crew: Crew | None = None,
        ranks: tuple[RankInfo, ...] = (),
    ) -> None:
        """With several ranks (`crew`, and what each owns) all of them run the same rounds. `patience_s` bounds the
        whole wait from freeze to verdict; `beta` is the share of error feedback; `beat` is told the phase, for
        heartbeats; `onlooker` what moves and what is committed; `data` is what is read."""
        self._peer, self._member, self._comm, self._state = peer, member, comm, state
        self._schedule = schedule
        self._grid, self._codec, self._clock, self._patience_s = grid, codec, clock, patience_s
        self._beat = beat
        self.onlooker = onlooker or Nobody()
        self.data = data or NoData()
        self._crew = crew or Crew.alone()
        self.feedback = ErrorFeedback(codec, np.asarray([0, state.anchor.size], dtype=np.int64), beta)
        self._result = self._contribution = np.empty(0, dtype=np.uint8)
        self._mean: Floats = np.empty(0, dtype=np.float32)
        whole = RankInfo("", 0, (Range(0, grid.numel),))
        self._follow(routing((peer,), {peer: ranks or (whole,)}, grid))

    def _follow(self, routes: Routing) -> bool:
        """Encode and decode by these routes from now on. Whether that is another way than before."""
        self._routing = routes
        part = routes.part(self._peer, self._crew.rank)
        known = self.feedback.runs
        if (
            self._result.size == part.runs.wire_bytes(self._codec)
            and np.array_equal(known.boundaries, part.runs.boundaries)
            and np.array_equal(known.starts, part.runs.starts)
        ):
            return False
        self.feedback.follow(part.runs)
        self._result = np.empty(part.runs.wire_bytes(self._codec), dtype=np.uint8)
        # The vectors themselves are what moves, if they are in the order of the wire.
        self._is_plain = is_plain(self._codec) and len(part.runs) <= 1
        self._contribution = self._result[:0] if self._is_plain else np.empty_like(self._result)
        return True

    def _decode(self, delta: Floats) -> Floats:
        """The mean that is being committed, in the order of the vector. It takes the place of `delta`, which no attempt
        encodes any more; where something is still owed of that, it has memory of its own."""
        if self._is_plain:
            return value_view(self._result)
        mean = delta
        if self.feedback.residual is not None:
            if not self._mean.size:
                self._mean = np.empty_like(delta)
            mean = self._mean
        self.feedback.runs.decode(self._codec, self._result, mean)
        return mean

    def run(self, delta: Floats, work: Work) -> RoundReport:
        """Blocks from freeze to verdict. `delta` is the pseudo-gradient (fp32, `grid.numel`). A commit may leave the
        mean in it; while there is none it is not changed.

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
        squared = kernels.squared_norm(delta)
        finite = self._encode() and math.isfinite(squared)
        digest = kernels.digest_bytes(self._contribution) if finite else b""
        shares = rounds._crew.share(FrozenRank, FrozenRank(squared, finite, digest))
        finite = all(each.finite for each in shares)
        self._norm = math.sqrt(sum(each.squared_norm for each in shares))
        digest = b"".join(each.digest for each in shares)
        if len(shares) > 1:
            digest = kernels.digest_bytes(np.frombuffer(digest, dtype=np.uint8))
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
            update_digest=digest.hex() if finite else "",
        )

    def _encode(self) -> bool:
        r = self._r
        if r._is_plain:
            self._contribution = wire_view(self._delta)
            return True
        self._contribution = r._contribution
        return r.feedback.encode(self._delta, self._contribution)

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
                if r._crew.decide(bool, lambda: r._clock.now_s() > deadline_s):
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
        r.onlooker.yield_to_round(True)
        try:
            reduced = self._move(plan)
        finally:
            r.onlooker.yield_to_round(False)
        if not reduced.report.ok:
            r._crew.tell_abort(plan.op)  # the other ranks wait in vain
        shares = r._crew.share(ReducedRank, reduced)
        report = report_of_peer([each.report for each in shares])
        self._attempts += 1
        self._stats = added(self._stats, report.stats)
        self._links = report.stats.links
        self._phases.wire_s += report.stats.wire_s
        digest = combined_digest(r._routing, [each.digests for each in shares]) if report.ok else ""
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

    def _move(self, plan: Plan) -> ReducedRank:
        """This rank's engine takes part."""
        r = self._r
        try:
            if r._follow(routing_of(plan, r._grid)) and self._ready.finite:
                self._encode()
        except ValueError as error:
            return ReducedRank(ReduceReport(ok=False, reason=f"op {plan.op}: {error}"))
        contributes = any(c.peer == r._peer for c in plan.contributions)
        report = r._comm.reduce(plan, r._grid, self._contribution if contributes else None, r._result)
        if not report.ok:
            return ReducedRank(report)
        return ReducedRank(report, route_digests(r._routing, r._codec, r._peer, r._crew.rank, r._result))

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
            update = self._update(verdict, shape)
            # ---- commit line: from here on every member does the same arithmetic on the same bytes ----
            state.commit(r._decode(self._delta), shape)
            if not r._is_plain and any(c.peer == r._peer for c in verdict.contributions):
                r.feedback.commit(self._delta, self._contribution)
            digest = state.digest()
            self._phases.apply_s = r._clock.now_s() - started_s
            if state.version != verdict.version:
                raise Diverged(f"this peer is at version {state.version} after a commit of {verdict.version}")
            r._member.applied(Applied(version=state.version, digest=digest))
            part = r._routing.part(r._peer, r._crew.rank)
            r.onlooker.keep(update, r._result, r._routing.wire_slices(r._codec, part))
            if not all(r._crew.share(bool, math.isfinite(kernels.squared_norm(state.anchor)))):
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
            boundaries=tuple(r._routing.grid.boundaries.tolist()),
            order=r._routing.order,
            routes=tuple(r._routing.wire_cuts(r._codec).tolist()) if len(r._routing.routes) > 1 else (),
            wire_bytes=r._routing.grid.wire_bytes(r._codec),
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
