"""The ranks of a peer watch each other, on a thread of their own: whatever the training threads are stuck in.

Every rank has a connection to rank 0 (`mesh.links`), which passes on what concerns all. Over it go signs of life, the
abort of an operation, an orderly goodbye, and the reason why a rank ends. A sibling is lost when its connection closes
without a goodbye, or when nothing came from it for `dead_s`. Then no rank can go on: the model is in pieces.

What a loss does: the others are told; the training thread has GRACE_S to hear of it by itself (`check` raises in it,
and so does what it does over a crew) and then TAKEN_S to close. If it does not, because it is inside a collective or a
device, the watch says goodbye in its place for at most GOODBYE_S, writes one line, and ends the process.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from atoll import log
from atoll.errors import AtollError, SiblingLost
from atoll.mesh.links import REASON_CHARS, Abort, Alive, BrokenLinkError, Ended, Goodbye, Link, Message
from atoll.values import OpId

TICK_S = 0.1
PAUSE_S = 1.0
"""A tick that took longer was a pause of this process or machine: it counts as nobody's silence."""
GRACE_S = 1.0
TAKEN_S = 4.0
GOODBYE_S = 2.0
LINGER_S = 2.0
"""How long an orderly close waits for the goodbyes of the others, so that none loses what is still on its way."""
FLUSH_S = 0.3

_log = log.get(__name__)


class Watch:
    """This rank's part of it. Made with the links of `mesh.links.connect`; ends with `close`, once.

    `on_abort(op)` and `goodbye(reason)` come from threads of the watch; the first must only tell the engine, the second
    may block for GOODBYE_S.
    """

    def __init__(self, rank: int, num_ranks: int, links: dict[int, Link], *, dead_s: float) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._links = links
        self._dead_s = dead_s
        self._on_abort: Callable[[OpId], None] = lambda op: None
        self._goodbye: Callable[[str], None] = lambda reason: None
        self._changed = threading.Condition()
        self._outbox: list[Message] = []
        self._ended: Ended | None = None
        self._act_at_s = float("inf")
        self._taken = self._closing = self._away = False
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="atoll-watch", daemon=True)
        self._thread.start()

    # ---- any thread ---------------------------------------------------------------------------------------

    def listen(
        self,
        *,
        on_abort: Callable[[OpId], None] | None = None,
        goodbye: Callable[[str], None] | None = None,
    ) -> None:
        """Set what is called when a sibling gives up an operation, and before this process is ended."""
        self._on_abort = on_abort or self._on_abort
        self._goodbye = goodbye or self._goodbye

    def set_dead_s(self, dead_s: float) -> None:
        """How long a sibling may be silent."""
        self._dead_s = dead_s

    def tell_abort(self, op: OpId) -> None:
        """Have all other ranks give up `op`. Does not wait."""
        self._post(Abort(op))

    def tell_end(self, error: BaseException) -> None:
        """Have all other ranks end because of `error`, which ends this one. Does not wait."""
        with self._changed:
            self._outbox.append(_ended_by(self._rank, error))
            if not isinstance(error, SiblingLost):
                # It ends for a reason of its own, and in its own time: it may have a save to wait for.
                self._away, self._act_at_s = True, float("inf")
        self._wake()

    # ---- the training thread ------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises SiblingLost if a sibling is lost or ended with an error; then `close` has to come within TAKEN_S."""
        with self._changed:
            if self._ended is None:
                return
            if not self._taken:
                self._taken = True
                self._act_at_s = time.monotonic() + TAKEN_S
            raise self._error(self._ended)

    def check_soon(self) -> None:
        """`check`, but give the watch GRACE_S/2 to hear of a loss that something else was the first to notice."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None, GRACE_S / 2)
        self.check()

    @contextmanager
    def explaining(self) -> Generator[None]:
        """Inside, a RuntimeError (a collective of torch) becomes SiblingLost if a sibling is lost within GRACE_S/2."""
        try:
            yield
        except RuntimeError as error:
            try:
                self.check_soon()
            except SiblingLost as lost:
                raise lost from error
            raise

    def close(self, error: BaseException | None = None) -> None:
        """End the watch. Without `error` this rank is done: waits at most LINGER_S for the others to be done too. With
        one, the others are told to end with it. Idempotent."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            if self._ended is None:
                self._outbox.append(_ended_by(self._rank, error) if error is not None else Goodbye())
        self._wake()
        self._thread.join(LINGER_S + GOODBYE_S + FLUSH_S)

    # ---- the watch's thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        for link in self._links.values():
            poll.register(link, select.POLLIN)
        looked_s = sent_s = time.monotonic()
        while not self._closing:
            ready = {number for number, _ in poll.poll(TICK_S * 1000)}
            now_s = time.monotonic()
            paused_s = now_s - looked_s if now_s - looked_s > PAUSE_S else 0.0
            looked_s = now_s
            if self._reader in ready:
                os.read(self._reader, 64)
            for rank, link in list(self._links.items()):
                link.heard_s += paused_s
                if link.fileno() in ready:
                    number = link.fileno()
                    if not self._receive(rank, link):
                        poll.unregister(number)
            self._send_outbox()
            if now_s - sent_s >= TICK_S * 0.9:
                sent_s = now_s
                self._send(Alive())
            self._look_for_silence(time.monotonic())
            with self._changed:
                acts = time.monotonic() >= self._act_at_s
            if acts:
                self._act()
        self._part()

    def _receive(self, rank: int, link: Link) -> bool:
        """Take what came; whether there may be more."""
        try:
            for message in link.receive():
                self._take(rank, link, message)
        except BrokenLinkError:
            if not link.left:
                self._lose(rank, "its connection closed")
            self._links.pop(rank, None)
            link.close()
            return False
        return True

    def _take(self, rank: int, link: Link, message: Message) -> None:
        match message:
            case Abort(op=op):
                self._send(message, beside=rank)
                self._tell_engine(op)
            case Goodbye():
                link.left = True
            case Ended():
                link.left = True  # what it says is why its connection closes
                self._send(message, beside=rank)
                self._note(message)
            case Alive():
                pass

    def _tell_engine(self, op: OpId) -> None:
        try:
            self._on_abort(op)
        except Exception:
            _log.exception("the engine did not take the abort of %s", op)

    def _look_for_silence(self, now_s: float) -> None:
        for rank, link in self._links.items():
            if not link.left and now_s - link.heard_s > self._dead_s:
                self._lose(rank, f"no sign of life for dead_s = {self._dead_s:g} s")

    def _lose(self, rank: int, how: str) -> None:
        if self._ended is None and not self._away:
            ended = Ended(rank, f"rank {rank} of {self._num_ranks} of this peer is lost: {how}", 9)
            self._send(ended, beside=rank)
            self._note(ended)

    def _note(self, ended: Ended) -> None:
        with self._changed:
            if self._ended is None and not self._away:
                self._ended = ended
                self._act_at_s = time.monotonic() + GRACE_S
                self._changed.notify_all()

    def _send_outbox(self) -> None:
        with self._changed:
            messages, self._outbox = self._outbox, []
        for message in messages:
            self._away = self._away or isinstance(message, (Goodbye, Ended))
            self._send(message)

    def _send(self, message: Message, beside: int = -1) -> None:
        for rank, link in self._links.items():
            if rank != beside:
                with suppress(BrokenLinkError):  # reading says so, after what the other end said last
                    link.send(message)

    def _act(self) -> None:
        """The training thread does not end by itself: end the process."""
        assert self._ended is not None
        error = self._error(self._ended)
        farewell = threading.Thread(
            target=self._goodbye, args=(str(error),), name="atoll-goodbye", daemon=True
        )
        farewell.start()
        farewell.join(GOODBYE_S)
        self._flush()
        kind = "error: " if error.exit_code else ""
        with suppress(OSError):
            os.write(2, f"atoll: {kind}{error}\n".encode())
        os._exit(error.exit_code)

    def _part(self) -> None:
        """Say what there is to say, and go."""
        self._send_outbox()
        self._flush()
        linger_s = LINGER_S if self._ended is None else 0.0
        until_s = time.monotonic() + linger_s
        while any(not link.left for link in self._links.values()) and time.monotonic() < until_s:
            self._hear_out(TICK_S)
        for link in self._links.values():
            link.end_sending()
        # A connection that is closed with something unread in it is reset, and what we said last may be lost.
        until_s = time.monotonic() + FLUSH_S
        while self._links and time.monotonic() < until_s:
            self._hear_out(TICK_S)
        for link in self._links.values():
            link.close()
        with self._changed:
            reader, writer, self._writer = self._reader, self._writer, -1
        os.close(reader)
        os.close(writer)

    def _hear_out(self, timeout_s: float) -> None:
        by_number = {link.fileno(): (rank, link) for rank, link in self._links.items()}
        poll = select.poll()
        for number in by_number:
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll(timeout_s * 1000):
            self._receive(*by_number[number])

    def _flush(self) -> None:
        until_s = time.monotonic() + FLUSH_S
        for link in self._links.values():
            with suppress(BrokenLinkError):
                while not link.flush() and time.monotonic() < until_s:
                    time.sleep(0.01)

    # ---- small things -------------------------------------------------------------------------------------

    def _post(self, message: Message) -> None:
        with self._changed:
            self._outbox.append(message)
        self._wake()

    def _wake(self) -> None:
        with self._changed, suppress(BlockingIOError):  # full: it is about to wake
            if self._writer >= 0:
                os.write(self._writer, b"\0")

    def _error(self, ended: Ended) -> SiblingLost:
        return SiblingLost(f"{ended.reason}; rank {self._rank} ends too", ended.exit_code)


def _ended_by(rank: int, error: BaseException) -> Ended:
    """How the siblings are told of it."""
    match error:
        case AtollError():
            reason, code = str(error), error.exit_code
        case KeyboardInterrupt():
            reason, code = str(error) or "stopped by SIGINT", 130
        case SystemExit(code=int(code)):
            reason = str(error)
        case _:
            reason, code = f"{type(error).__name__}: {error}", 1
    lines = reason.splitlines() or [type(error).__name__]
    return Ended(rank, f"rank {rank} of this peer ended: {lines[0]}"[:REASON_CHARS], code)
