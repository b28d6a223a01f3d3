"""The inside of the membership thread: keeps a connection to the coordinator and feeds the member machine.

Everything here runs on one event loop, that of the thread "atoll-membership" (owned by `membership.client`).
It reconnects for as long as the machine lets it, sends heartbeats, and lays what the machine decides on the
desk.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable

import msgspec

from atoll import log
from atoll.clock import MonotonicClock
from atoll.errors import AtollError, Dismissed, Diverged, QuorumLost, Refused, Unreachable
from atoll.membership import member, steps
from atoll.membership.desk import Desk
from atoll.membership.link import (
    Admission,
    Credentials,
    Link,
    Secure,
)
from atoll.membership.member_state import Phase
from atoll.membership.messages import (
    CatchUp,
    CoordinatorMessage,
    Heartbeat,
    Leave,
    Message,
    PeerMessage,
    Probe,
    Reach,
    Serve,
    SessionKey,
    Verdict,
    View,
)
from atoll.membership.search import Find, Search
from atoll.membership.steps import Connected, CoordinatorSaid, Disconnected, MemberEvent, Tick, TrainerSaid
from atoll.values import OpId, Plan

OUTBOX_MESSAGES = 1024
RENEW_AGAIN_S = 60.0

Renew = Callable[[str, Secure], Awaitable[tuple[Secure, float]]]
"""Get another certificate from the coordinator at this address, and in how many seconds the next one is due. Runs on
the event loop; raises AtollError."""

_FAILURES: dict[str, type[AtollError]] = {
    "refused": Refused,
    "unreachable": Unreachable,
    "quorum": QuorumLost,
    "left_out": QuorumLost,
    "ended": QuorumLost,
    "dismissed": Dismissed,
    "diverged": Diverged,
}

_log = log.get(__name__)


class Attendant:
    """Feeds one member machine. `progress` (step, phase, steps in the round, of how many) may be set by any
    thread; the rest belongs to the loop.
    """

    def __init__(
        self,
        who: Credentials,
        desk: Desk,
        *,
        on_abort: Callable[[OpId], None],
        on_session_key: Callable[[bytes], None],
        on_serve: Callable[[], None],
        on_probe: Callable[[Probe | Reach], None],
        connect_s: float,
        reach_s: float,
        renew: Renew | None = None,
        find: Find | None = None,
    ) -> None:
        self.progress = (0, "connecting", 0, 0)
        self._peer = who.peer
        self._search = Search(who, connect_s=connect_s, reach_s=reach_s, find=find)
        self._desk = desk
        self._on_abort = on_abort
        self._on_session_key = on_session_key
        self._on_serve = on_serve
        self._on_probe = on_probe
        self._renew = renew
        self._clock = MonotonicClock()
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self._linked, self._unlinked = asyncio.Event(), asyncio.Event()
        self._outbox: asyncio.Queue[Message] = asyncio.Queue(OUTBOX_MESSAGES)
        self._session_key: bytes | None = None
        self._last_heard_s = 0.0

    async def run(self) -> None:
        """Until stopped, or goodbye was said, or membership ends (then the desk says why).

        Raises Unreachable and Refused.
        """
        self._task = asyncio.current_task()
        if self._stopped:
            return
        with contextlib.suppress(asyncio.CancelledError):
            link = await self._search.first()
            begun = member.start(self._peer, link.admission.timeouts, self._clock.now_s())
            self._state = begun.state
            pulse = asyncio.create_task(self._pulse(link.admission.timeouts.heartbeat_s))
            try:
                await self._follow(link)
                while self._state.phase is not Phase.OVER:
                    link = await self._search.again(link.admission.timeouts)
                    await self._follow(link)
            finally:
                pulse.cancel()

    # ---- called on the loop by the client ------------------------------------------------------------------

    def say(self, message: PeerMessage) -> None:
        self._step(TrainerSaid(message))

    def leave(self, message: Leave, timeout_s: float, said: Callable[[], None]) -> None:
        """Say goodbye on the present connection, or the next one if it comes in time; then call `said`."""
        self._leaving = asyncio.create_task(self._leave(message, timeout_s, said))

    def stop(self) -> None:
        self._stopped = True
        if self._task is not None:
            self._task.cancel()

    async def _leave(self, message: Leave, timeout_s: float, said: Callable[[], None]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._linked.wait()
                self.say(message)
                await self._outbox.join()
                # The coordinator closes once it has heard. Who goes before that, with words of the coordinator still
                # unread, resets the connection, and what was said last is lost with it.
                await self._unlinked.wait()
        said()

    # ---- the connection ------------------------------------------------------------------------------------

    async def _follow(self, link: Link) -> None:
        """One connection, from proof to its end."""
        self._last_heard_s = self._clock.now_s()
        self._outbox = asyncio.Queue(OUTBOX_MESSAGES)
        self._link = link
        self._note_admission(link.admission)
        sender = asyncio.create_task(self._empty_outbox(link, self._outbox))
        renewing = asyncio.create_task(self._keep_certificate(link.admission.renew_s))
        self._linked.set()
        self._unlinked.clear()
        try:
            self._beat()
            self._step(Connected(link.admission.term))
            while (message := await link.receive()) is not None:
                self._last_heard_s = self._clock.now_s()
                self._hear(message)
        finally:
            self._linked.clear()
            self._unlinked.set()
            sender.cancel()
            renewing.cancel()
            await link.close()
        self._step(Disconnected())

    async def _keep_certificate(self, renew_s: float) -> None:
        """Ask for another certificate when it is time to, for as long as this connection lasts."""
        who = self._search.who
        if self._renew is None or who.secure is None:
            return
        await asyncio.sleep(renew_s)
        while True:
            try:
                secure, renew_s = await self._renew(who.address, who.secure)
            except AtollError as error:
                _log.warning(
                    "cannot renew this peer's certificate: %s; trying again in %.0f s", error, RENEW_AGAIN_S
                )
                await asyncio.sleep(RENEW_AGAIN_S)
            else:
                who = msgspec.structs.replace(who, secure=secure)
                self._search.come_as(who)
                await asyncio.sleep(renew_s)

    def _note_admission(self, admission: Admission) -> None:
        key, self._session_key = self._session_key, admission.session_key
        self._desk.lay_admission(admission)
        if key is not None and key != admission.session_key:
            self._on_session_key(admission.session_key)

    async def _empty_outbox(self, link: Link, outbox: asyncio.Queue[Message]) -> None:
        with contextlib.suppress(OSError):  # the receiving side notices, and reconnects
            while True:
                await link.send(await outbox.get())
                outbox.task_done()

    async def _pulse(self, heartbeat_s: float) -> None:
        """Four ticks to a heartbeat; drops a connection on which nothing was heard for dead_s."""
        last_s = self._clock.now_s()
        for count in itertools.count(1):
            await asyncio.sleep(heartbeat_s / 4)
            now_s = self._clock.now_s()
            if now_s - last_s > heartbeat_s:
                self._last_heard_s = now_s  # this process slept: what was said meanwhile waits to be read
            last_s = now_s
            self._step(Tick())
            if count % 4 == 0:
                self._beat()
            if self._linked.is_set() and now_s - self._last_heard_s > self._link.admission.timeouts.dead_s:
                _log.warning(
                    "nothing heard from the coordinator for %.1f s; connecting again",
                    now_s - self._last_heard_s,
                )
                self._search.others_first()  # it is frozen or cut off
                await self._link.close()

    # ---- the machine ---------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self._send(Heartbeat(*self.progress))

    def _hear(self, message: CoordinatorMessage) -> None:
        if isinstance(message, SessionKey):
            self._note_admission(msgspec.structs.replace(self._desk.admission(), session_key=message.key))
            return
        if isinstance(message, View):
            self._desk.lay_view(message)
        self._step(CoordinatorSaid(message))

    def _step(self, event: MemberEvent) -> None:
        try:
            step = member.step(self._state, event, self._clock.now_s())
            self._state = step.state
            for effect in step.effects:
                self._carry_out(effect)
        except Exception as error:  # a fault of ours: the training thread must hear of it
            self._end(error)

    def _carry_out(self, effect: steps.Effect) -> None:
        match effect:
            case steps.Send(_, message):
                self._send(message)
            case steps.Order(CatchUp() as order):
                self._desk.lay_catch_up(order)
            case steps.Order(Plan() | Verdict() as order):
                self._desk.lay_order(order)
            case steps.TellLeases(slots, answers):
                self._desk.lay_leases(slots, answers)
            case steps.Resume():
                self._desk.lay_resume()
            case steps.ServeOthers(version, stage):
                self._on_serve()
                if stage:
                    self._desk.lay_serve(Serve(version, stage))
            case steps.MeasureLinks(order):
                self._on_probe(order)
            case steps.AbortAttempt(op, reason):
                _log.info("attempt %s is given up: %s", op, reason)
                self._on_abort(op)
            case steps.RequestFreeze(round):
                self._desk.lay_freeze(round)
            case steps.RequestLeave(reason):
                self._desk.lay_leave(reason)
            case steps.CloseConnection():
                self._closing = asyncio.create_task(self._link.close())
            case steps.Fail(kind, reason):
                also = (
                    f" ({self._search.shown}: {self._search.missed or 'silent'})"
                    if kind == "unreachable"
                    else ""
                )
                self._end(_FAILURES[kind](reason + also))
            case _:
                raise AssertionError(f"not an effect of a member: {effect!r}")

    def _send(self, message: Message) -> None:
        """Lost if there is no connection: the machine says it again when there is one.

        So a connection that takes no more has to end, or what is lost would never be said again.
        """
        if not self._linked.is_set():
            return
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            _log.warning("the coordinator takes no more than %d messages; connecting again", OUTBOX_MESSAGES)
            self._linked.clear()
            self._closing = asyncio.create_task(self._link.close())

    def _end(self, failure: Exception) -> None:
        self._desk.lay_failure(failure)
        self.stop()
