"""A coordinator machine with its clock and its journal, for tests that talk to it message by message."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from atoll.events import Event
from atoll.membership import coordinator
from atoll.membership.coordinator import CoordinatorState
from atoll.membership.coordinator_draft import MakeLanes
from atoll.membership.messages import Declare, Heartbeat, PeerMessage, Reach, Reached, Ready, Scalar, Vote
from atoll.membership.operator import Done, EvictPeer, LeavePeer, StopRun
from atoll.membership.settings import CoordinatorSettings, Timeouts
from atoll.membership.steps import (
    Answer,
    CoordinatorEvent,
    Effect,
    Emit,
    Finish,
    Journal,
    JournalRecord,
    OperatorSaid,
    PeerArrived,
    PeerSaid,
    Send,
    Step,
    Tick,
)
from atoll.plan.planner import choose
from atoll.values import Edge, LinkRate, ParameterInfo, Plan, Range, RankInfo, TransferStats

LAYOUT = (ParameterInfo("w", (4,), "float32"),)
SETTINGS: dict[str, Scalar] = {"outer.weights": "tokens", "outer.codec": "int8", "run.seed": 1}

E = TypeVar("E", bound=Event)


def owning_all(message: Declare) -> Declare:
    """The same, with one rank that owns all, where nothing is said of what ranks own."""
    whole = Range(0, sum(math.prod(each.shape) for each in message.layout))
    if any(each.ranges for each in message.ranks):
        return message
    first = message.ranks[0] if message.ranks else RankInfo("", 0, ())
    return replace(message, ranks=(replace(first, ranges=(whole,)),))


class Desk:
    """A coordinator machine with its clock, its journal, and all it did. Who is asked whom it can dial says at once
    that it can dial all, unless told otherwise."""

    def __init__(
        self, records: tuple[JournalRecord, ...] = (), make_lanes: MakeLanes = choose, **settings: Any
    ) -> None:
        known = {field.name for field in msgspec.structs.fields(Timeouts)}
        waits = Timeouts(**{key: settings.pop(key) for key in set(settings) & known})
        self.settings = CoordinatorSettings(run="r", timeouts=waits, **settings)
        self.layout = LAYOUT
        self.run_settings = SETTINGS
        self.slots, self.wish = 0, 0
        self.now_s = 50.0
        self.all_reach_all = True
        self.journal = list(records)
        self.state: CoordinatorState
        self._make_lanes = make_lanes
        self.take(coordinator.start(self.settings, records, b"k", None, self.now_s))

    def take(self, step: Step[Any]) -> tuple[Effect, ...]:
        self.state, self.last = step.state, step
        self.journal += [each.record for each in step.effects if isinstance(each, Journal)]
        assert step.reason
        return step.effects

    def hear(self, event: CoordinatorEvent) -> tuple[Effect, ...]:
        effects = self.take(coordinator.step(self.state, event, self.now_s, make_lanes=self._make_lanes))
        if not self.all_reach_all:
            return effects
        step = self.last
        for each in effects:
            if isinstance(each, Send) and isinstance(each.message, Reach):
                where = dict.fromkeys(each.message.targets, "an address")
                effects += self.said(each.peer, Reached(where, {}), self.state.peers[each.peer].incarnation)
        self.last = step
        return effects

    def said(self, peer: str, message: PeerMessage, incarnation: str = "1") -> tuple[Effect, ...]:
        """A declaration that says nothing of what its rank owns means one rank that owns all."""
        if isinstance(message, Declare):
            message = owning_all(message)
        return self.hear(PeerSaid(peer, incarnation, message))

    def order(self, request: StopRun | LeavePeer | EvictPeer) -> Done:
        """An operator's request; its answer."""
        (answer,) = [each for each in self.hear(OperatorSaid(7, request)) if isinstance(each, Answer)]
        assert answer.ticket == 7
        return answer.reply

    def join(
        self, *peers: str, incarnation: str = "1", digest: str = "d0", ranks: tuple[RankInfo, ...] = ()
    ) -> tuple[Effect, ...]:
        effects: tuple[Effect, ...] = ()
        for peer in peers:
            self.hear(PeerArrived(peer, incarnation, "host"))
            declared = Declare(
                self.layout,
                self.run_settings,
                ranks,
                0,
                0,
                digest,
                0,
                num_slots=self.slots,
                wish=self.wish,
            )
            effects = self.said(peer, declared, incarnation)
        return effects

    def ready(
        self, *peers: str, digest: str = "d0", finite: bool = True, train_s: float = 0.0, round_steps: int = 0
    ) -> tuple[Effect, ...]:
        effects: tuple[Effect, ...] = ()
        for peer in peers:
            number, version = self.state.round.number, self.state.version
            tokens, norm, update = 100 * finite, 1.0 * finite, f"update of {peer}"
            message = Ready(
                number,
                version,
                digest,
                tokens,
                10,
                norm,
                finite,
                update_digest=update,
                train_s=train_s,
                round_steps=round_steps,
            )
            effects = self.said(peer, message)
        return effects

    def vote(
        self, peer: str, digest: str, broken: tuple[Edge, ...] = (), links: tuple[LinkRate, ...] = ()
    ) -> tuple[Effect, ...]:
        """Yes with this digest, or no if it is empty."""
        reason, stats = "" if digest else "no", TransferStats(links=links)
        return self.said(peer, Vote(self.plan().op, bool(digest), digest, broken, reason, stats))

    def plan(self) -> Plan:
        """Of the attempt under way."""
        assert self.state.round.attempt is not None
        return self.state.round.attempt.plan

    def wait(self, seconds: float, *beating: str) -> list[Effect]:
        effects: list[Effect] = []
        for half in range(round(2 * seconds)):
            self.now_s += 0.5
            for peer in beating if half % 2 else ():
                effects += self.said(peer, Heartbeat(half, "local"))
            effects += self.hear(Tick())
        return effects


def sent(effects: Any, kind: type) -> list[str]:
    """To whom messages of a kind went."""
    return [each.peer for each in effects if isinstance(each, Send) and isinstance(each.message, kind)]


def emitted(effects: Any, kind: type[E]) -> list[E]:
    """The events of a kind."""
    return [each.event for each in effects if isinstance(each, Emit) and isinstance(each.event, kind)]


def finish_of(effects: Any) -> int | None:
    return next((each.exit_code for each in effects if isinstance(each, Finish)), None)
