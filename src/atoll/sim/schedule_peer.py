"""A virtual peer: the real member machine, and a trainer and an engine that are a few lines each.

The trainer "trains" for a random time, says it is ready, takes part in attempts, and obeys verdicts blindly,
so that a wrong verdict shows. It reads what is leased to it (`schedule_data`). When it has to catch up it takes over
what another process holds. Its weights are one hash (`schedule_arithmetic.next_digest`). It counts rounds and the run's
step by the verdicts that it obeys; rounds skipped without its hearing of them it makes up for then.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import msgspec

from atoll.membership.leases import SlotTable
from atoll.membership.member import Phase
from atoll.membership.messages import (
    Applied,
    CatchUp,
    CaughtUp,
    CoordinatorMessage,
    Declare,
    Heartbeat,
    Leave,
    PeerMessage,
    Reach,
    Reached,
    Ready,
    SlotsWanted,
    SnapshotWanted,
    Verdict,
    Vote,
)
from atoll.membership.steps import (
    AbortAttempt,
    Connected,
    CoordinatorSaid,
    Disconnected,
    Fail,
    MeasureLinks,
    MemberEvent,
    Order,
    RequestFreeze,
    RequestLeave,
    Resume,
    Send,
    TellLeases,
    Tick,
    TrainerSaid,
)
from atoll.sim.schedule_arithmetic import next_digest, steps_of_round
from atoll.sim.schedule_data import LENGTHS, VirtualReader
from atoll.values import OpId, ParameterInfo, Plan, Range, RankInfo, ReduceReport

if TYPE_CHECKING:
    from atoll.sim.schedule_coordinator import Connection
    from atoll.sim.schedule_world import World

LAYOUT = (ParameterInfo("w", (8,), "float32"),)
TICK_S = 0.9
TRIAL_S = 0.3
PACE = (0.5, 2.0)


def _dials(peer: str, other: str) -> bool:
    return zlib.crc32(f"{peer} dials {other}".encode()) % 4 > 0


class Process:
    """Something that can be frozen and killed: events for it wait while it is frozen, and vanish when it
    is gone.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.frozen_until_s = 0.0


class Held(msgspec.Struct, frozen=True):
    """The state that a process begins with."""

    version: int
    version_term: int
    digest: str
    round: int
    run_step: int
    slots: SlotTable | None = None


class VirtualPeer(Process):
    """One process of a peer, from its start to its end."""

    def __init__(self, world: World, peer: str, incarnation: str, held: Held) -> None:
        super().__init__(f"{peer}/{incarnation}")
        self.world, self.peer, self.incarnation = world, peer, incarnation
        self.connection: Connection | None = None
        self.version, self.digest, self.sound = held.version, held.digest, True
        self.round, self.run_step, self.freeze_round = held.round, held.run_step, -1
        self.step, self.steps_in_round, self.tokens_in_round = 0, 0, 0
        self.slow = world.rng.choice((1.0, 1.0, 1.0, 3.0))
        self.asked_to_leave = False
        self.ended = ""
        self.catch_up: CatchUp | None = None
        self.began_s, self.train_s = world.now_s, 0.0
        self.training = 0  # numbers the stretches of training, so that an old alarm finishes no newer one
        self.reader = VirtualReader(peer, world.rng)
        self.carries = world.rng.random() < 0.3
        self.asked, self._has_asked = 0, False
        self.state = world.machines.member_start(peer, world.settings.timeouts, world.now_s).state
        self._say(self._declaration(held))
        world.connect(self)
        world.after(TICK_S * world.rng.random(), self, self.tick)

    def snapshot(self) -> Held:
        slots = self.state.slots
        return Held(self.version, self.state.version_term, self.digest, self.round, self.run_step, slots)

    def _declaration(self, held: Held) -> Declare:
        return Declare(
            layout=LAYOUT,
            settings=self.world.run_settings,
            ranks=(RankInfo("127.0.0.1", 1, (Range(0, 8),), sidecar_port=2),),
            version=self.version,
            round=self.round,
            digest=self.digest,
            step=0,
            version_term=held.version_term,
            num_slots=len(LENGTHS),
            wish=self.reader.wish,
            slots=held.slots,
        )

    # ---- the machine -------------------------------------------------------------------------------------

    def feed(self, event: MemberEvent) -> None:
        if self.ended:
            return
        step = self.world.machines.member_step(self.state, event, self.world.now_s)
        self.state = step.state
        if not isinstance(event, Tick):
            self.world.note(self.name, event, step.reason)
        for effect in step.effects:
            match effect:
                case Send(message=message):
                    self.world.peer_sends(self, message)
                case Order(order=Plan() as plan):
                    self.world.engine.begin(self, plan)
                case Order(order=Verdict() as verdict):
                    self._obey(verdict)
                case Order(order=CatchUp() as order):
                    self.catch_up = order
                    self._fetch()
                case TellLeases(slots=slots, answers=answers):
                    self.reader.slots = slots
                    if answers:
                        self._go_on_reading(answers)
                case Resume():
                    if self.catch_up is not None:
                        self.catch_up, self.freeze_round = None, -1
                    self._begin_reading()
                    self._train()
                case AbortAttempt(op=op):
                    self.world.engine.abort(self, op)
                case RequestFreeze(round=number):
                    self.freeze_round = max(self.freeze_round, number)
                    self._train()
                case MeasureLinks(order=Reach() as order):
                    self.world.after(TRIAL_S, self, lambda order=order: self._say_reached(order))
                case RequestLeave():
                    self.asked_to_leave = True
                    self._train()
                case Fail(reason=reason):
                    self.end(reason)

    def _say_reached(self, order: Reach) -> None:
        """Of any two some cannot dial each other: which, their names decide."""
        if self.ended:
            return
        where = {each: "somewhere" for each in order.targets if _dials(self.peer, each)}
        failed = {each: "no answer" for each in order.targets if each not in where}
        self._say(Reached(where, failed))

    def _say(self, message: PeerMessage) -> None:
        self.feed(TrainerSaid(message))

    def tick(self) -> None:
        if self.ended:
            return
        self.feed(Tick())
        self.world.after(TICK_S, self, self.tick)
        if self.state.phase is Phase.LOCAL:
            self.step += 1
        self.world.peer_sends(self, Heartbeat(step=self.step, phase=self.state.phase))

    # ---- the connection ----------------------------------------------------------------------------------

    def connected(self, connection: Connection, term: int) -> None:
        if self.ended or self.connection is not connection:
            return
        connection.proven = True
        self.feed(Connected(term))

    def disconnected(self, connection: Connection) -> None:
        if self.ended or self.connection is not connection:
            return
        self.connection = None
        if connection.proven:
            self.feed(Disconnected())
        self.world.connect(self)

    def hear(self, connection: Connection | None, message: CoordinatorMessage) -> None:
        if connection is None or (self.connection is connection and connection.proven):
            self.feed(CoordinatorSaid(message))

    # ---- the trainer -------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Train for a while (again), or only to the next step if the round is closed; then be ready."""
        rng = self.world.rng
        self.training += 1
        self.began_s = self.world.now_s
        number = self.training
        frozen = self.freeze_round > self.round or self.asked_to_leave
        length_s = rng.uniform(0.0, 0.4) if frozen else rng.uniform(*PACE) * self.slow
        self.world.after(length_s, self, lambda: self._finish_training(number))

    def _finish_training(self, number: int) -> None:
        if self.ended or number != self.training or self.state.phase is not Phase.LOCAL:
            return
        if self.asked_to_leave:
            self._say(Leave("asked to leave", done=False))
            self.end("asked to leave")
            return
        rng = self.world.rng
        if self.reader.is_dry() and not self._has_asked:
            self._has_asked = True
            self.asked += 1
            asked = self.asked
            self._say(SlotsWanted(asked, rng.randint(1, 2)))
            self.world.after(self.world.settings.timeouts.dead_s, self, lambda: self._go_on_reading(asked))
            return
        reads = self.reader.read()
        steps = 0 if not reads or rng.random() < 0.06 else rng.randint(1, 4)
        self.steps_in_round += steps
        self.tokens_in_round += steps * 12
        self.train_s += self.world.now_s - self.began_s
        finite = rng.random() > 0.03
        ready = Ready(
            round=self.round + 1,
            version=self.version,
            digest=self.digest,
            tokens=self.tokens_in_round,
            steps=self.steps_in_round,
            norm=rng.choice((0.9, 1.0, 1.3, 1e6 if rng.random() < 0.1 else 1.1)) if finite else float("nan"),
            finite=finite,
            train_s=self.train_s,
            round_steps=steps_of_round(self.run_step + steps_of_round(self.run_step)),
            reads=self.reader.reads(),
            wish=self.reader.wish,
        )
        stamped = msgspec.structs.replace(ready, round=self.state.round + 1)
        self.world.history.peer_is_ready(self.peer, self.incarnation, stamped)
        self._say(ready)

    def _go_on_reading(self, asked: int) -> None:
        """What it wished for was answered, or nobody answers."""
        if asked == self.asked and self._has_asked:
            self.reader.go_on()
            self._finish_training(self.training)

    def _begin_reading(self) -> None:
        """A member (again): work goes on only if it carries it, and nobody else was leased what it read."""
        if self.carries and self.steps_in_round and self.reader.is_unbroken():
            self.reader.go_on()
        else:
            self._drop_work()
            self.reader.begin()

    def _drop_work(self) -> None:
        self.steps_in_round = self.tokens_in_round = 0
        self.train_s = 0.0

    def reduced(self, op: OpId, report: ReduceReport, digest: str) -> None:
        """The engine's report: vote as it says."""
        vote = Vote(op, report.ok, digest if report.ok else "", report.broken, report.reason, report.stats)
        self.world.history.peer_votes(self.peer, vote)
        self._say(vote)

    def _obey(self, verdict: Verdict) -> None:
        self._has_asked = False
        while self.round < self.world.machines.rounds_before(self.round, verdict):
            self._pass_round()
        if verdict.outcome == "skipped":
            self._pass_round()
            if self.peer in verdict.left_out:
                self._drop_work()
                self.reader.begin()
            else:
                self.reader.go_on()
            self._after_verdict(verdict)
        else:
            self.world.after(self.world.rng.uniform(0.0, 0.3), self, lambda: self._apply(verdict))

    def _apply(self, verdict: Verdict) -> None:
        if self.ended:
            return
        self.world.history.peer_applies(self.peer, self.version, verdict)
        self.version += 1
        self.digest = next_digest(self.digest, self.run_step, verdict.contributions, verdict.digest)
        self._pass_round()
        if self.sound:
            self.world.history.peer_applied(self.peer, verdict, self.digest)
            self.world.snapshots.append(self.snapshot())
        self._drop_work()
        self.reader.begin()
        self._say(Applied(self.version, self.digest))
        self._after_verdict(verdict)

    def _fetch(self) -> None:
        """Take over, after a while, what one of the sources holds, if its digest is the run's; else try again."""
        self.training += 1  # whatever it trained is given up
        number = self.training
        self.world.after(self.world.rng.uniform(0.05, 1.0), self, lambda: self._take_over(number))

    def _take_over(self, number: int) -> None:
        order = self.catch_up
        if self.ended or order is None or number != self.training or self.state.applying is not None:
            return
        names = {source.peer for source in order.sources}
        donors = [
            each
            for each in self.world.processes
            if each.alive
            and not each.ended
            and each is not self
            and each.peer in names
            and order.digests.get(each.version) == each.digest
            and (each.version > self.version or not order.trusted)
        ]
        if not donors:
            if self.world.rng.random() < 0.3:
                self._say(SnapshotWanted(self.version))
            self._fetch()
            return
        donor = self.world.rng.choice(donors)
        self.version, self.digest, self.sound = donor.version, donor.digest, donor.sound
        self.round, self.run_step = donor.round, donor.run_step
        self.world.history.peer_caught_up(self.peer, self.version, self.digest)
        self._say(CaughtUp(self.version, self.round, self.digest, self.run_step))

    def _pass_round(self) -> None:
        self.round += 1
        self.run_step += steps_of_round(self.run_step)

    def _after_verdict(self, verdict: Verdict) -> None:
        if verdict.ends or self.version >= self.world.target_version:
            self._say(Leave("all that was asked for is committed", done=True))
            self.end("done")
        else:
            self._train()

    def end(self, reason: str) -> None:
        self.ended = reason
        self.world.engine.gone(self)
        self.world.hang_up(self)
