"""The membership of a peer of several ranks: rank 0 has it, and its siblings hear of it at the same lines.

Every rank runs the same loop. Where that asks the membership something, rank 0 looks and tells all (`mesh.crew`), so
all ranks of a peer see one answer; between two looks it stays what it was. What is said to the coordinator is said by
rank 0 alone. With one rank the session uses `membership.client.Member` itself.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from atoll.errors import AtollError
from atoll.membership.client import LEAVE_S, Admission, Member
from atoll.membership.leases import SlotTable
from atoll.membership.messages import (
    Applied,
    CatchUp,
    CaughtUp,
    Declare,
    Probed,
    Reached,
    Ready,
    Verdict,
    View,
    Vote,
)
from atoll.mesh.crew import LONG_S, Crew
from atoll.values import Plan


class Heard(msgspec.Struct, frozen=True):
    """What rank 0 has heard from the coordinator by now. `stage` is the version that a snapshot is due of."""

    view: View | None
    catch_up: CatchUp | None
    stage: int | None
    freeze_round: int
    leave_reason: str
    session_key: bytes

    def __repr__(self) -> str:
        return f"Heard({self.view}, {self.catch_up})"


class _Order(msgspec.Struct, frozen=True):
    """The next order of a round, if there is one by now."""

    heard: Heard
    plan: Plan | None = None
    verdict: Verdict | None = None
    catch_up: CatchUp | None = None


class _Wait(msgspec.Struct, frozen=True):
    """One look while rank 0 waits to be a member; the last one has what came of it."""

    heard: Heard
    view: View | None = None
    catch_up: CatchUp | None = None


class RankedMember:
    """`membership.client.Member` for each rank of a peer: the same methods, of which those that look are called by all
    ranks together (`check`, `declare`, `caught_up`, `next_order`). All are for the training thread."""

    def __init__(
        self, crew: Crew, member: Member | None, on_session_key: Callable[[bytes], None] = lambda key: None
    ) -> None:
        """`member` is rank 0's, None elsewhere. `on_session_key` is told of a new key, except on rank 0, whose member
        tells it at once."""
        assert (member is not None) == crew.is_lead
        self._crew, self._member, self._on_session_key = crew, member, on_session_key
        self._heard = Heard(None, None, None, -1, "", b"")

    # ---- all ranks together ------------------------------------------------------------------------------------

    def connect(self) -> Admission:
        """As `Member.connect`; all ranks get rank 0's admission, or its error."""
        admission = self._crew.decide(Admission, lambda: self.lead.connect(), within_s=LONG_S)
        self._heard = msgspec.structs.replace(self._heard, session_key=admission.session_key)
        return admission

    def check(self) -> None:
        """Hear what rank 0 has heard. Raises what ended membership, on all ranks."""
        self._take(self._crew.decide(Heard, self._look))

    def declare(self, message: Declare, meanwhile: Callable[[], None] = lambda: None) -> View | CatchUp:
        """As `Member.declare`; `message` counts on rank 0."""
        return self._wait(lambda beat: self.lead.declare(message, beat), meanwhile)

    def caught_up(self, message: CaughtUp) -> View | CatchUp:
        """As `Member.caught_up`; `message` counts on rank 0."""
        return self._wait(lambda beat: self.lead.caught_up(message), lambda: None)

    def next_order(self, timeout_s: float) -> Plan | Verdict | CatchUp | None:
        """As `Member.next_order`."""

        def look() -> _Order:
            order = self.lead.next_order(timeout_s)
            return _Order(
                self._look(),
                order if isinstance(order, Plan) else None,
                order if isinstance(order, Verdict) else None,
                order if isinstance(order, CatchUp) else None,
            )

        order = self._crew.decide(_Order, look)
        self._take(order.heard)
        return order.plan or order.verdict or order.catch_up

    def newest_view(self) -> View:
        """The membership as rank 0 has it now."""
        view = self._crew.decide(View, lambda: self.lead.view())
        self._heard = msgspec.structs.replace(self._heard, view=view, catch_up=None)
        return view

    def _wait(
        self, wait: Callable[[Callable[[], None]], View | CatchUp], meanwhile: Callable[[], None]
    ) -> View | CatchUp:
        """Rank 0 waits, and tells the others at every look that it does."""
        if self._member is None:
            while True:
                step = self._crew.hear(_Wait, within_s=LONG_S)
                self._take(step.heard)
                if (outcome := step.view or step.catch_up) is not None:
                    return outcome
                meanwhile()

        told: list[AtollError] = []

        def beat() -> None:
            try:
                self._take(self._crew.decide(_Wait, lambda: _Wait(self._look())).heard)
            except AtollError as error:
                told.append(error)  # all ranks have it
                raise
            meanwhile()

        try:
            found = wait(beat)
            view = found if isinstance(found, View) else None
            last = _Wait(self._look(view), view, found if isinstance(found, CatchUp) else None)
        except AtollError as error:
            if error not in told:
                self._tell(error)
            raise
        self._take(self._crew.decide(_Wait, lambda: last).heard)
        return found

    def _tell(self, error: AtollError) -> None:
        """Raises it, on all ranks."""

        def give() -> _Wait:
            raise error

        self._crew.decide(_Wait, give)

    # ---- as last heard, the same on all ranks --------------------------------------------------------------------

    def to_catch_up(self) -> CatchUp | None:
        return self._heard.catch_up

    def snapshot_due(self) -> int | None:
        """The version to stage a snapshot of, once."""
        due = self._heard.stage
        self._heard = msgspec.structs.replace(self._heard, stage=None)
        return due

    @property
    def session_key(self) -> bytes:
        return self.lead.session_key if self._member is not None else self._heard.session_key

    def view(self) -> View:
        assert self._heard.view is not None, "declare() first"
        return self._heard.view

    def freeze_requested(self, round: int) -> bool:
        return self._heard.freeze_round >= round

    def asked_to_leave(self) -> str:
        return self._heard.leave_reason

    # ---- rank 0 alone ----------------------------------------------------------------------------------------------

    @property
    def lead(self) -> Member:
        """For what rank 0 does while the others wait."""
        assert self._member is not None, "only rank 0 speaks to the coordinator"
        return self._member

    def slots(self) -> SlotTable | None:
        return self._member.slots() if self._member is not None else None

    def want_slots(self, more: int, timeout_s: float) -> bool:
        return self.lead.want_slots(more, timeout_s)

    def want_snapshot(self, version: int) -> None:
        self.lead.want_snapshot(version)

    def progress(self, step: int, phase: str, steps_in_round: int = 0, round_steps: int = 0) -> None:
        if self._member is not None:
            self._member.progress(step, phase, steps_in_round, round_steps)

    def ready(self, message: Ready) -> None:
        if self._member is not None:
            self._member.ready(message)

    def vote(self, message: Vote) -> None:
        if self._member is not None:
            self._member.vote(message)

    def applied(self, message: Applied) -> None:
        if self._member is not None:
            self._member.applied(message)

    def probed(self, message: Probed | Reached) -> None:
        self.lead.probed(message)

    def leave(self, reason: str, done: bool, timeout_s: float = LEAVE_S) -> None:
        if self._member is not None:
            self._member.leave(reason, done, timeout_s)

    def close(self) -> None:
        if self._member is not None:
            self._member.close()

    # ---- details ---------------------------------------------------------------------------------------------------

    def _look(self, view: View | None = None) -> Heard:
        """On rank 0. Raises what ended membership."""
        member = self.lead
        member.check()
        return Heard(
            view=view or (member.view() if self._heard.view is not None else None),
            catch_up=member.to_catch_up(),
            stage=member.snapshot_due(),
            freeze_round=member.freeze_round(),
            leave_reason=member.asked_to_leave(),
            session_key=member.session_key,
        )

    def _take(self, heard: Heard) -> None:
        if self._member is None and heard.session_key != self._heard.session_key:
            self._on_session_key(heard.session_key)
        if heard.stage is None and self._heard.stage is not None:  # one that nobody has looked at yet
            heard = msgspec.structs.replace(heard, stage=self._heard.stage)
        self._heard = heard


AnyMember = Member | RankedMember
"""A session's membership, with one rank or with several."""
