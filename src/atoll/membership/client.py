"""A peer's membership, as the training thread sees it: one object, one thread behind it.

`Member` owns the thread "atoll-membership": connection, heartbeats, and the member machine run there (see
`membership.attendant`), in the trainer's own process, so that a killed trainer falls silent at once. The
training thread calls the methods here; the `on_...` calls come from the membership thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import Callable

from atoll.addresses import split_addresses
from atoll.errors import Unreachable
from atoll.membership import auth
from atoll.membership.attendant import Attendant, Renew
from atoll.membership.desk import SLICE_S, Desk
from atoll.membership.leases import SlotTable
from atoll.membership.link import Admission, Credentials, Secure
from atoll.membership.messages import (
    Applied,
    CatchUp,
    CaughtUp,
    Declare,
    Leave,
    PeerMessage,
    Probe,
    Probed,
    Reach,
    Reached,
    Ready,
    SlotsWanted,
    SnapshotWanted,
    Verdict,
    View,
    Vote,
)
from atoll.membership.search import Find
from atoll.values import OpId, Plan

__all__ = ["Admission", "Member"]

LEAVE_S = 2.0
JOIN_S = 2.0
"""A thread that does not end by then is a daemon, and ends with the process."""


class Member:
    """This peer's place in a run. All methods are for the training thread, except where noted.

    `address` is the coordinator's, or those of all coordinators that may lead, separated by commas.
    `on_abort(op)` is called at once when an attempt is given up, and must only tell the engine.
    `on_session_key(key)` is called when a restarted coordinator has another session key, `on_serve()` when somebody
    catches up and this peer's sidecar is to run, `on_probe(order)` when links are to be measured; all on the membership
    thread. `wait_s` above `connect_s` allows to
    start before the coordinator is up. With `secure` the connection is TLS, and its certificate takes the token's
    place; `renew` gets another one in time, on the membership thread. `find` tells there where the coordinator is by
    now, once it is not reached for a few seconds. Raises ConfigError for an address or token that cannot be right.
    """

    def __init__(
        self,
        *,
        address: str,
        run: str,
        peer: str,
        token: bytes,
        on_abort: Callable[[OpId], None],
        on_session_key: Callable[[bytes], None] = lambda key: None,
        on_serve: Callable[[], None] = lambda: None,
        on_probe: Callable[[Probe | Reach], None] = lambda order: None,
        wait_s: float = 0.0,
        connect_s: float = 10.0,
        secure: Secure | None = None,
        renew: Renew | None = None,
        find: Find | None = None,
    ) -> None:
        if secure is None:
            auth.check_token(token)
        split_addresses(address)
        who = Credentials(
            address=address,
            run=run,
            peer=peer,
            incarnation=secrets.token_hex(8),
            token=token,
            secure=secure,
        )
        self._peer = peer
        self._desk = Desk()
        self._attendant = Attendant(
            who,
            self._desk,
            on_abort=on_abort,
            on_session_key=on_session_key,
            on_serve=on_serve,
            on_probe=on_probe,
            connect_s=connect_s,
            reach_s=max(connect_s, wait_s),
            renew=renew,
            find=find,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._asked = 0

    def connect(self) -> Admission:
        """Prove the token; blocks at most `max(connect_s, wait_s)`. Raises Unreachable or Refused."""
        assert self._thread is None, "connect() once"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._attend, args=(self._loop,), name="atoll-membership", daemon=True
        )
        self._thread.start()
        return self._desk.wait_admission()

    def declare(self, message: Declare, meanwhile: Callable[[], None] = lambda: None) -> View | CatchUp:
        """Declare what this peer holds; blocks until it is a member of a run that has all its start peers (the view),
        or is told to catch up first. `meanwhile` is called twice a second: a run that goes on may wait for peers that
        need what this one holds.

        Raises Refused (other model, settings or version), Unreachable (coordinator lost) or QuorumLost.
        """
        self._say(message)
        return self._desk.wait_membership(1, meanwhile=meanwhile)

    @property
    def lead(self) -> Member:
        """Itself; for a peer of several ranks that of rank 0 (`diloco.ranked_member`)."""
        return self

    def to_catch_up(self) -> CatchUp | None:
        """The order to catch up, as last heard, while this peer is no member; else None. Any thread."""
        return self._desk.catch_up()

    def want_snapshot(self, version: int) -> None:
        """Have the members stage a snapshot: the updates after `version` are not to be had. Any thread."""
        self._say(SnapshotWanted(version))

    def caught_up(self, message: CaughtUp) -> View | CatchUp:
        """Say what this peer holds now; blocks until it is a member again, or the run is further on by now.

        Raises as `declare`.
        """
        resumed = self._desk.resumed()
        self._say(message)
        return self._desk.wait_membership(resumed + 1, message.version)

    def snapshot_due(self) -> int | None:
        """The version to stage a snapshot of (a newer one will do), if the coordinator asked for one; only once."""
        order = self._desk.take_serve()
        return order.version if order else None

    @property
    def session_key(self) -> bytes:
        """The key that engines of this run know each other by. Any thread."""
        return self._desk.admission().session_key

    def view(self) -> View:
        """The membership as last heard. Raises what ended it."""
        return self._desk.view()

    def check(self) -> None:
        """Raises what ended membership, if anything did."""
        self._desk.check()

    def progress(self, step: int, phase: str, steps_in_round: int = 0, round_steps: int = 0) -> None:
        """What the next heartbeats say: the inner step, what this peer is doing, and how far it is in its round."""
        self._attendant.progress = (step, phase, steps_in_round, round_steps)

    def freeze_requested(self, round: int) -> bool:
        """Whether the coordinator closed this round: contribute what there is at the next safe point."""
        return self._desk.freeze_round() >= round

    def freeze_round(self) -> int:
        """The newest round that the coordinator closed; -1 if it closed none."""
        return self._desk.freeze_round()

    def asked_to_leave(self) -> str:
        """Why an operator wishes this peer to leave at its next safe point; "" if none does."""
        return self._desk.leave_reason()

    def slots(self) -> SlotTable | None:
        """Positions in the data and leases, as last heard; None if nothing is leased."""
        return self._desk.slots()

    def want_slots(self, more: int, timeout_s: float) -> bool:
        """Ask for `more` data slots before the round ends; blocks until this is answered (then `slots` has what there
        is), at most `timeout_s`. False if there is no answer."""
        self._asked += 1
        self._say(SlotsWanted(self._asked, more))
        return self._desk.wait_answer(self._asked, timeout_s)

    def ready(self, message: Ready) -> None:
        self._say(message)

    def vote(self, message: Vote) -> None:
        self._say(message)

    def applied(self, message: Applied) -> None:
        self._say(message)

    def next_order(self, timeout_s: float) -> Plan | Verdict | CatchUp | None:
        """The next attempt to take part in, the verdict to obey, or the order to catch up; None after `timeout_s`.

        Raises Unreachable (coordinator lost), QuorumLost (left out, or too few peers), Refused or Diverged. A
        verdict that came before is handed out first.
        """
        return self._desk.take_order(timeout_s)

    def probed(self, message: Probed | Reached) -> None:
        """What links were measured to carry, or whom this peer reaches. Any thread."""
        self._say(message)

    def leave_for(self, reason: str) -> None:
        """Say goodbye in the training thread's place, which is too busy to do so. Any thread; does not wait."""
        self._post(lambda: self._attendant.leave(Leave(reason, done=False), LEAVE_S, lambda: None))

    def leave(self, reason: str, done: bool, timeout_s: float = LEAVE_S) -> None:
        """Say goodbye and see it sent, for at most `timeout_s`, then close. Never raises for the network."""
        said = threading.Event()
        self._post(lambda: self._attendant.leave(Leave(reason, done), timeout_s, said.set))
        deadline_s = time.monotonic() + timeout_s + SLICE_S
        while self._is_attended() and time.monotonic() < deadline_s and not said.wait(SLICE_S / 10):
            pass
        self.close()

    def close(self) -> None:
        """Drop the connection and join the thread, within JOIN_S. Idempotent."""
        self._desk.lay_failure(Unreachable("membership is closed"))
        self._post(self._attendant.stop)
        if self._thread is not None:
            # A signal may have come while it was being started: it was told to stop, and ends by itself.
            with contextlib.suppress(RuntimeError):
                self._thread.join(JOIN_S)

    def _is_attended(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _say(self, message: PeerMessage) -> None:
        self._post(lambda: self._attendant.say(message))

    def _post(self, call: Callable[[], None]) -> None:
        """Run `call` on the membership thread; nothing happens once that has ended, and `check` says why."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(call)

    def _attend(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread's body."""
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(self._attendant.run())
        except BaseException as error:  # whatever it is, the training thread must hear of it
            self._desk.lay_failure(error)
