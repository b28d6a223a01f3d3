"""A peer's membership, as the training thread sees it: one object, one thread behind it.

`Member` owns the thread "atoll-membership": connection, heartbeats, and the member machine run there (see
`membership.attendant`), in the trainer's own process, so that a killed trainer falls silent at once. The
training thread calls the methods here; only `on_abort` and `on_session_key` are called from the membership
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import Callable

from atoll.errors import Unreachable
from atoll.membership import auth
from atoll.membership.attendant import Attendant
from atoll.membership.desk import SLICE_S, Desk
from atoll.membership.link import Admission, Credentials, split_address
from atoll.membership.messages import Applied, Declare, Leave, PeerMessage, Ready, Verdict, View, Vote
from atoll.values import OpId, Plan

__all__ = ["Admission", "Member"]


class Member:
    """This peer's place in a run. All methods are for the training thread, except where noted.

    `on_abort(op)` is called at once when an attempt is given up, and must only tell the engine.
    `on_session_key(key)` is called when a restarted coordinator has another session key. `wait_s` above
    `connect_s` allows to start before the coordinator is up. Raises ConfigError for an address or token that
    cannot be right.
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
        wait_s: float = 0.0,
        connect_s: float = 10.0,
    ) -> None:
        auth.check_token(token)
        split_address(address)
        who = Credentials(address=address, run=run, peer=peer, incarnation=secrets.token_hex(8), token=token)
        self._peer = peer
        self._desk = Desk()
        self._attendant = Attendant(
            who,
            self._desk,
            on_abort=on_abort,
            on_session_key=on_session_key,
            connect_s=connect_s,
            reach_s=max(connect_s, wait_s),
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def connect(self) -> Admission:
        """Prove the token; blocks at most `max(connect_s, wait_s)`. Raises Unreachable or Refused."""
        assert self._thread is None, "connect() once"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._attend, args=(self._loop,), name="atoll-membership", daemon=True
        )
        self._thread.start()
        return self._desk.wait_admission()

    def declare(self, message: Declare) -> View:
        """Declare what this peer holds; blocks until the run has all its start peers.

        Raises Refused (other model, settings or version), Unreachable (coordinator lost) or QuorumLost.
        """
        self._say(message)
        return self._desk.wait_view(lambda view: view.started and self._peer in view.members)

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

    def progress(self, step: int, phase: str) -> None:
        """What the next heartbeats say: the inner step, and what this peer is doing."""
        self._attendant.progress = (step, phase)

    def freeze_requested(self, round: int) -> bool:
        """Whether the coordinator closed this round: contribute what there is at the next safe point."""
        return self._desk.freeze_round() >= round

    def ready(self, message: Ready) -> None:
        self._say(message)

    def vote(self, message: Vote) -> None:
        self._say(message)

    def applied(self, message: Applied) -> None:
        self._say(message)

    def next_order(self, timeout_s: float) -> Plan | Verdict | None:
        """The next attempt to take part in, or the verdict to obey; None after `timeout_s`.

        Raises Unreachable (coordinator lost), QuorumLost (left out, or too few peers), Refused or Diverged. A
        verdict that came before is handed out first.
        """
        return self._desk.take_order(timeout_s)

    def leave(self, reason: str, done: bool, timeout_s: float = 2.0) -> None:
        """Say goodbye and see it sent, for at most `timeout_s`, then close. Never raises for the network."""
        said = threading.Event()
        self._post(lambda: self._attendant.leave(Leave(reason, done), timeout_s, said.set))
        deadline_s = time.monotonic() + timeout_s + SLICE_S
        while self._is_attended() and time.monotonic() < deadline_s and not said.wait(SLICE_S / 10):
            pass
        self.close()

    def close(self) -> None:
        """Drop the connection and join the thread. Idempotent."""
        self._desk.lay_failure(Unreachable("membership is closed"))
        self._post(self._attendant.stop)
        if self._thread is not None:
            self._thread.join()

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
