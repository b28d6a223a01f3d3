"""What the membership thread lays down and the training thread picks up, under one condition."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from atoll.errors import AtollError, MembershipError
from atoll.membership.link import Admission
from atoll.membership.messages import Verdict, View
from atoll.values import Plan

SLICE_S = 0.5  # the longest sleep between two looks at the clock, so that signals always get through


class Desk:
    """The latest admission, view and order, and what ended membership. A newer order replaces an older plan.

    One slot for orders is enough: the coordinator plans again only after it gave the older attempt up, and
    neither a plan nor a commit of the next round can come before this peer was ready for it. It can be skipped
    without this peer; the later of two such verdicts stands for both.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._admission: Admission | None = None
        self._view: View | None = None
        self._order: Plan | Verdict | None = None
        self._freeze_round = -1
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

    def lay_freeze(self, round: int) -> None:
        with self._changed:
            self._freeze_round = max(self._freeze_round, round)

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

    def wait_view(self, holds: Callable[[View], bool]) -> View:
        """Blocks until a view for which `holds` is true. Raises what ends membership meanwhile."""
        with self._changed:
            while self._view is None or not holds(self._view):
                self._raise_failure()
                self._changed.wait(SLICE_S)
            return self._view

    def take_order(self, timeout_s: float) -> Plan | Verdict | None:
        """The next order, or None after `timeout_s`. A verdict counts even if membership ended after it."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._order is not None and (isinstance(self._order, Verdict) or self._failure is None):
                    order, self._order = self._order, None
                    return order
                self._raise_failure()
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    return None
                self._changed.wait(min(remaining_s, SLICE_S))

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
