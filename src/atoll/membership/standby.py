"""Several coordinators of one run: one leads, the others stand by and take over when its lease has ended.

Who stands by accepts no peer: it answers every connection with "not me, try the next", tells operators who leads, and
asks etcd four times a second. Everything runs on the coordinator's event loop; calls to etcd block it, each for a
bounded time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from atoll import __version__, log
from atoll.errors import Unreachable
from atoll.events import CoordinatorSteppedDown, CoordinatorStoodBy, EventLog
from atoll.membership import gate
from atoll.membership.doorway import Doorway
from atoll.membership.etcd_client import EtcdGone
from atoll.membership.etcd_journal import Contender, EtcdJournal
from atoll.membership.gate import Gate
from atoll.membership.journal import LeadLost
from atoll.membership.link import STANDING_BY
from atoll.membership.operator import OPERATOR_PATH, Reply, Request, StandingBy
from atoll.membership.operator_door import attend_operator
from atoll.membership.register import Register
from atoll.membership.registrar import Holder, Trust
from atoll.membership.steps import Finish, JournalRecord

POLL_S = 0.25
REGISTER_S = 15.0
"""Reading all records costs etcd more than asking who leads."""

_log = log.get(__name__)


async def lead_in_turn(
    contender: Contender,
    run: str,
    lead: Callable[[EtcdJournal], Awaitable[tuple[int, str]]],
    *,
    foresee: Callable[[Sequence[JournalRecord]], Finish | None],
    listeners: list[socket.socket],
    events: EventLog,
    connect_s: float,
    register: Callable[[], Register],
    trust: Trust | None,
    stop: asyncio.Event,
) -> tuple[int, str] | None:
    """Lead whenever nobody else does, until `lead` says that the run is over; None once `stop` is set.

    `foresee` tells whether a coordinator with these records would end at once: then it need not stand by. Raises
    Unreachable if etcd does not answer within `connect_s` at the start; later it is waited for.
    """
    try:
        records = await _first_records(contender, connect_s, stop)
        end = foresee(records)
        if end is not None:
            return end.exit_code, end.reason
        while not stop.is_set():
            notice = _Notice(run)
            known = register()
            known.learn(*records)
            async with _refusing(listeners, known, trust, notice):
                journal = await _stand_by(contender, events, notice, known, stop)
            if journal is None:
                break
            with contextlib.closing(journal):
                try:
                    return await lead(journal)
                except LeadLost as loss:
                    records = journal.records
                    events.emit(CoordinatorSteppedDown(reason=str(loss)))
        return None
    finally:
        contender.close()


async def _first_records(
    contender: Contender, connect_s: float, stop: asyncio.Event
) -> tuple[JournalRecord, ...]:
    clock = asyncio.get_running_loop()
    deadline_s = clock.time() + connect_s
    while not stop.is_set():
        try:
            return contender.records()
        except EtcdGone as error:
            if clock.time() + POLL_S >= deadline_s:
                raise Unreachable(
                    f"cannot use journal {contender.place}: {error} for {connect_s:.3g} s; "
                    "start etcd, or check the addresses in --journal"
                ) from None
        await _pause(stop)
    return ()


@dataclass(slots=True)
class _Notice:
    """Who leads, as etcd said last, for operators."""

    run: str
    leader: str = ""
    trouble: str = "it asks etcd just now"

    async def reply(self, who: Holder, request: Request) -> Reply:
        return StandingBy(run=self.run, package=__version__, leader=self.leader, trouble=self.trouble)


async def _stand_by(
    contender: Contender, events: EventLog, notice: _Notice, known: Register, stop: asyncio.Event
) -> EtcdJournal | None:
    """Wait until the lead is ours. None once `stop` is set. Tokens that the leader makes meanwhile become `known`."""
    told, missed = "", ""
    clock = asyncio.get_running_loop()
    look_at_s = clock.time() + REGISTER_S
    while not stop.is_set():
        try:
            if clock.time() >= look_at_s:
                known.learn(*contender.records())
                look_at_s = clock.time() + REGISTER_S
            leader = contender.leader()
            notice.leader = leader.address if leader is not None else ""
            notice.trouble = "" if leader is not None else "nobody leads just now"
            if leader is None:
                journal = contender.take_lead()
                if journal is not None:
                    return journal
            elif leader.id != told:
                told = leader.id
                events.emit(CoordinatorStoodBy(address=contender.address, leader=leader.address))
            missed = ""
        except (EtcdGone, LeadLost) as error:
            if not missed:
                _log.warning("cannot lead: %s; standing by until etcd answers", error)
            missed = str(error)
            notice.leader, notice.trouble = "", missed
        await _pause(stop)
    return None


async def _pause(stop: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), POLL_S)


@contextlib.asynccontextmanager
async def _refusing(
    listeners: list[socket.socket], register: Register, trust: Trust | None, notice: _Notice
) -> AsyncGenerator[None]:
    """Answer whoever connects meanwhile; of strangers nothing is read beyond one request."""
    strangers = Gate(trust.context if trust else None)

    async def tell(websocket: web.WebSocketResponse, transport: asyncio.Transport | None) -> None:
        await attend_operator(websocket, transport, register, strangers, notice.reply, tls=trust is not None)

    doorway = Doorway(
        "atoll coordinator, standing by",
        {OPERATOR_PATH: tell},
        STANDING_BY,
        authority=trust.authority if trust else "",
    )
    admitting = [
        asyncio.create_task(gate.admit_connections(each, strangers, doorway.http)) for each in listeners
    ]
    try:
        yield
    finally:
        for task in admitting:
            task.cancel()
        await asyncio.gather(*admitting, return_exceptions=True)
        strangers.close()
        await doorway.close()
