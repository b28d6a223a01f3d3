"""What the membership thread lays down and the training thread picks up, under one condition."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from atoll.errors import AtollError, MembershipError
from atoll.membership.leases import SlotTable
from atoll.membership.link import Admission
from atoll.membership.messages import CatchUp, Serve, Verdict, View
from atoll.values import Plan

SLICE_S = 0.5  # the longest sleep between two looks at the clock, so that signals always get through


class Desk:
    """The latest admission, view and orders, and what ended membership. A newer order replaces an older plan.

    One slot for orders is enough: the coordinator plans again only after it gave the older attempt up, and
    neither a plan nor a commit of the next round can come before this peer was ready for it. It can be skipped
    without this peer; the later of two such verdicts stands for both. An order to catch up has a place of its own:
    it stands, and is replaced by newer ones, until this peer is a member again. A verdict that came before is obeyed
    first.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._admission: Admission | None = None
        self._view: View | None = None
        self._order: Plan | Verdict | None = None
        self._catch_up: CatchUp | None = None
        self._serve: Serve | None = None
        self._slots: SlotTable | None = None
        self._answered = 0
        self._resumed = 0
        self._freeze_round = -1
        self._leave_reason = ""
        self._failure: BaseException | None = None

    # ---- the membership thread lays down -------------------------------------------------------------------

    def lay_admission(self, admission: Admission) -> None:
        with self._changed:
            self._admission = admission
            self._changed.notify_all()

    def lay_view(self, view: View) -> None:
        with self._changed:
            self._view = view
            self._changed.notify_all()

    def lay_order(self, order: Plan | Verdict) -> None:
        with self._changed:
            replaces = not isinstance(self._order, Verdict) or (_skips(self._order) and _skips(order))
            assert replaces, f"{order} came before the trainer took {self._order}"
            self._order = order
            self._changed.notify_all()

    def lay_catch_up(self, order: CatchUp) -> None:
        """What was to be reduced is not, any more."""
        with self._changed:
            self._catch_up = order
            if isinstance(self._order, Plan):
                self._order = None
            self._changed.notify_all()

    def lay_leases(self, slots: SlotTable, answers: int) -> None:
        with self._changed:
            self._slots = slots
            self._answered = max(self._answered, answers)
            self._changed.notify_all()

    def lay_resume(self) -> None:
        """This peer is a member (again). Freezes of rounds before that are no concern of it."""
        with self._changed:
            if self._catch_up is not None:
                self._catch_up, self._freeze_round = None, -1
            self._resumed += 1
            self._changed.notify_all()

    def lay_serve(self, order: Serve) -> None:
        with self._changed:
            self._serve = order

    def lay_freeze(self, round: int) -> None:
        with self._changed:
            self._freeze_round = max(self._freeze_round, round)

    def lay_leave(self, reason: str) -> None:
        with self._changed:
            self._leave_reason = reason

    def lay_failure(self, failure: BaseException) -> None:
        """The first failure stays: what follows is only its echo."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    # ---- the training thread picks up ----------------------------------------------------------------------

    def check(self) -> None:
        """Raise what ended membership, if anything did."""
        with self._changed:
            self._raise_failure()

    def wait_admission(self) -> Admission:
        """Blocks until admitted; whoever connects bounds the wait and lays down a failure."""
        with self._changed:
            while self._admission is None:
                self._raise_failure()
                self._changed.wait(SLICE_S)
            return self._admission

    def wait_membership(
        self, resumed: int, version: int = -1, meanwhile: Callable[[], None] = lambda: None
    ) -> View | CatchUp:
        """Blocks until this peer is a member (for the `resumed`-th time, counted from 1), or has to catch up with
        another version than `version` first. `meanwhile` is called at every look."""
        while True:
            meanwhile()
            with self._changed:
                self._raise_failure()
                if self._catch_up is not None and self._catch_up.version != version:
                    return self._catch_up
                if self._resumed >= resumed and self._view is not None:
                    return self._view
                self._changed.wait(SLICE_S)

    def take_serve(self) -> Serve | None:
        """An order to stage a snapshot, once."""
        with self._changed:
            order, self._serve = self._serve, None
            return order

    def catch_up(self) -> CatchUp | None:
        """The order to catch up, while it stands."""
        with self._changed:
            return self._catch_up

    def resumed(self) -> int:
        """How often this peer became a member."""
        with self._changed:
            return self._resumed

    def take_order(self, timeout_s: float) -> Plan | Verdict | CatchUp | None:
        """The next order, or None after `timeout_s`. A verdict counts even if membership ended after it."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._order is not None and (isinstance(self._order, Verdict) or self._failure is None):
                    order, self._order = self._order, None
                    return order
                self._raise_failure()
                if self._catch_up is not None:
                    return self._catch_up
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    return None
                self._changed.wait(min(remaining_s, SLICE_S))

    def slots(self) -> SlotTable | None:
        """Positions in the data and leases, as last heard."""
        with self._changed:
            return self._slots

    def wait_answer(self, number: int, timeout_s: float) -> bool:
        """Blocks until the `number`-th wish for slots is answered, at most `timeout_s`; True if it was. Whoever has to
        catch up waits in vain."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while self._answered < number:
                self._raise_failure()
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0 or self._catch_up is not None:
                    return False
                self._changed.wait(min(remaining_s, SLICE_S))
            return True

    def admission(self) -> Admission:
        with self._changed:
            assert self._admission is not None, "connect() first"
            return self._admission

    def view(self) -> View:
        with self._changed:
            self._raise_failure()
            assert self._view is not None, "declare() first"
            return self._view

    def freeze_round(self) -> int:
        with self._changed:
            return self._freeze_round

    def leave_reason(self) -> str:
        """Why this peer was asked to leave; "" while it was not."""
        with self._changed:
            return self._leave_reason

    def _raise_failure(self) -> None:
        if self._failure is None:
            return
        if isinstance(self._failure, AtollError):
            raise self._failure
        raise MembershipError(
            f"the membership thread ended unexpectedly: {self._failure!r}"
        ) from self._failure


def _skips(order: Plan | Verdict) -> bool:
    return isinstance(order, Verdict) and order.outcome == "skipped"
