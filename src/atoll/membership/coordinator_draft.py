"""The draft of the coordinator's next state, that one step of its machine works on.

A step makes a `Draft` of the state, records what was heard, decides, and hands back a new state with the effects in
order. Pure: nothing is sent, written or asked here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from atoll import events
from atoll.membership.coordinator_state import CoordinatorState, Gone, PeerRecord, ids, remember
from atoll.membership.messages import Message, View
from atoll.membership.settings import Timeouts
from atoll.membership.steps import (
    CloseConnection,
    Effect,
    Emit,
    Finish,
    Journal,
    JournalRecord,
    MembersChanged,
    Send,
    Step,
)
from atoll.values import PlanChoice, PlanRequest

MakeLanes = Callable[[PlanRequest], PlanChoice]

_GONE_REMEMBERED = 128


class Draft:
    """One step in the making: the state so far, the effects in order, and the sentences that explain them."""

    def __init__(self, state: CoordinatorState, now_s: float, make_lanes: MakeLanes) -> None:
        self.state = state
        self.now_s = now_s
        self.make_lanes = make_lanes
        self.effects: list[Effect] = []
        self.reasons: list[str] = []

    @property
    def timeouts(self) -> Timeouts:
        return self.state.settings.timeouts

    def elapsed_s(self) -> float:
        """The run's age: the time of earlier coordinators and this one's, pauses included."""
        state = self.state
        return state.elapsed_before_s + self.now_s + state.paused_s - state.begun_s

    def why_last(self) -> str:
        """Why the open round is the run's last, in a sentence; "" if it is not."""
        limit_s = self.state.settings.max_seconds
        if self.state.stopping:
            return self.state.stopping
        return f"the run has lasted max_seconds = {limit_s:g} s" if 0 < limit_s <= self.elapsed_s() else ""

    def set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def set_round(self, **changes: Any) -> None:
        self.set(round=replace(self.state.round, **changes))

    def set_attempt(self, **changes: Any) -> None:
        attempt = self.state.round.attempt
        assert attempt is not None
        self.set_round(attempt=replace(attempt, **changes))

    def set_digest(self, digest: str) -> None:
        """The newest version's digest is agreed."""
        state = self.state
        self.set(digest=digest, known=remember(state.known, state.version, state.round.number - 1, digest))

    def put(self, record: PeerRecord) -> None:
        """Add or update one peer's record; a new one is the youngest."""
        self.set(peers={**self.state.peers, record.peer: record})

    def remove(self, peer: str, *, fenced: bool = False, done: bool = False) -> None:
        """Forget a peer's record, but not that its process took part. `done`: it had all it was asked for."""
        peers = dict(self.state.peers)
        record = peers.pop(peer)
        gone = self.state.gone
        if record.incarnation and (record.member or fenced):
            gone = (*gone, Gone((peer, record.incarnation), fenced))[-_GONE_REMEMBERED:]
        self.set(peers=peers, gone=gone, done=done if record.member else self.state.done)
        if self.state.slots is not None and peer in self.state.slots.leases:
            self.set(returning=tuple(dict.fromkeys((*self.state.returning, peer))))

    def fence_gone(self, peer: str, incarnation: str) -> None:
        """A process that was lost must not take its id back from this newer one."""
        if any(gone.process[0] == peer and gone.process[1] != incarnation for gone in self.state.gone):
            self.set(
                gone=tuple(
                    replace(gone, fenced=True)
                    if gone.process[0] == peer and gone.process[1] != incarnation
                    else gone
                    for gone in self.state.gone
                )
            )

    def send(self, peer: str, message: Message) -> None:
        """To a peer that is not connected nothing is sent: it hears the newest when it declares again."""
        record = self.state.peers.get(peer)
        if record is not None and record.connected:
            self.effects.append(Send(peer, message))

    def journal(self, record: JournalRecord) -> None:
        self.effects.append(Journal(record))

    def emit(self, event: events.Event) -> None:
        self.effects.append(Emit(event))

    def close(self, record: PeerRecord) -> None:
        if record.connected:
            self.effects.append(CloseConnection(record.peer, record.incarnation))

    def because(self, sentence: str) -> None:
        self.reasons.append(sentence)

    def finish(self, reason: str, exit_code: int) -> None:
        self.set(over=reason)
        self.effects.append(Finish(reason, exit_code))
        self.because(reason)

    def members_changed(self, reason: str) -> None:
        """Journal who is a member now, and tell the members."""
        state = self.state
        members = ids(state.members())
        self.journal(MembersChanged(members=members, started=state.started, done=state.done))
        view = self.view(reason)
        for peer in members:
            self.send(peer, view)

    def view(self, reason: str) -> View:
        state = self.state
        return View(
            term=state.term,
            version=state.version,
            round=state.round.number - 1,
            members=ids(state.members()),
            started=state.started,
            reason=reason,
        )

    def step(self, otherwise: str) -> Step[CoordinatorState]:
        return Step(self.state, tuple(self.effects), "; ".join(self.reasons) or otherwise)
