"""Peers and coordinators without weights, for protocol tests: in a thread, or as a process that starts in
half a second.

A fake peer's "state" is a hash chain over the verdicts it obeyed, and a round's "result" is a hash of the
plan: equal on all members, different for every other plan. As a process it is told everything on stdin (the
token too, never in argv), and says what it does in JSON lines on stdout.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from atoll.addresses import join_address, split_address
from atoll.errors import AtollError
from atoll.events import CoordinatorStoodBy, Event, EventLog, JsonLinesSink
from atoll.membership.client import Member
from atoll.membership.etcd_place import EtcdPlace
from atoll.membership.messages import (
    Applied,
    CatchUp,
    CaughtUp,
    Declare,
    Ready,
    Scalar,
    Verdict,
    View,
    Vote,
)
from atoll.membership.registrar import Trust
from atoll.membership.server import serve
from atoll.membership.settings import CoordinatorSettings, Timeouts
from atoll.membership.steps import TokenMade
from atoll.values import (
    Lane,
    OpId,
    ParameterInfo,
    Plan,
    PlanChoice,
    PlanRequest,
    Range,
    RankInfo,
    TransferStats,
)

TOKEN = b"the-token-of-the-protocol-tests"
SETTINGS: dict[str, Scalar] = {"outer.lr": 0.7, "run.steps": 100}
LAYOUT = (ParameterInfo("w", (2, 3), "float32"),)
QUICK = Timeouts(
    heartbeat_s=0.2,
    dead_s=1.0,
    stall_s=30.0,
    ready_wait_s=30.0,
    attempt_s=10.0,
    vote_s=5.0,
    connect_s=5.0,
    quorum_wait_s=20.0,
    coordinator_lost_s=20.0,
)


def make_lanes(request: PlanRequest) -> PlanChoice:
    return PlanChoice(frozenset(), tuple(Lane(peer) for peer in sorted(request.members)))


def digest_of(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class FakePeer:
    """A trainer in miniature on top of a real `Member`. `say(what, **values)` hears of everything it does."""

    def __init__(
        self,
        member: Member,
        peer: str,
        say: Callable[..., None] = lambda what, **values: None,
        reduce_s: float = 0.0,
    ) -> None:
        self.member, self.peer, self.say, self.reduce_s = member, peer, say, reduce_s
        self.version, self.round, self.step = 0, 0, 0
        self.digest = digest_of("start")
        self.verdicts: list[Verdict] = []

    def declaration(self, **changes: Any) -> Declare:
        values = {
            "layout": LAYOUT,
            "settings": SETTINGS,
            "version": self.version,
            "round": self.round,
        } | changes
        numel = sum(math.prod(each.shape) for each in values["layout"])
        ranks = (RankInfo("127.0.0.1", 0, (Range(0, numel),)),)
        return Declare(ranks=ranks, digest=self.digest, step=self.step, **values)

    def join(self, **changes: Any) -> None:
        self.member.connect()
        answer = self.member.declare(self.declaration(**changes))
        if isinstance(answer, CatchUp):
            self.catch_up(answer)
        self.say("joined")

    def run(self, rounds: int, within_s: float = 60.0) -> None:
        """Train until `rounds` rounds are committed."""
        while self.version < rounds:
            self.step += 1
            self.member.progress(self.step, "local")
            self.one_round(within_s)

    def one_round(self, within_s: float) -> None:
        self.say("ready", round=self.round + 1)
        self.member.ready(
            Ready(self.round + 1, self.version, self.digest, tokens=10, steps=1, norm=1.0, finite=True)
        )
        deadline_s = time.monotonic() + within_s
        while True:
            order = self.member.next_order(timeout_s=0.5)
            if isinstance(order, Plan):
                self.vote(order)
            elif isinstance(order, Verdict):
                return self.obey(order)
            elif isinstance(order, CatchUp):
                return self.catch_up(order)
            elif time.monotonic() > deadline_s:
                raise AssertionError(f"{self.peer}: no verdict of round {self.round + 1} in {within_s} s")

    def catch_up(self, order: CatchUp | View) -> None:
        """Take over the run's digest of the newest version, as if its state had been fetched."""
        while isinstance(order, CatchUp):
            deadline_s = time.monotonic() + 20
            while order.version not in order.digests:
                assert time.monotonic() < deadline_s, (
                    f"{self.peer} was never told the digest of {order.version}"
                )
                time.sleep(0.01)
                order = self.member.to_catch_up() or order
            self.version, self.round, self.digest = order.version, order.round, order.digests[order.version]
            self.say("caught up", version=self.version)
            order = self.member.caught_up(CaughtUp(self.version, self.round, self.digest, self.step))

    def vote(self, plan: Plan) -> None:
        self.say("plan", op=str(plan.op), members=plan.members)
        time.sleep(self.reduce_s)  # the time a real reduction takes
        self.member.vote(Vote(plan.op, True, digest_of(plan.contributions), (), "done", TransferStats()))

    def obey(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        self.round = verdict.op.round
        if verdict.outcome == "committed":
            assert verdict.version == self.version + 1, f"{self.peer} holds {self.version}, heard {verdict}"
            self.version = verdict.version
            self.digest = digest_of(self.digest, verdict.digest)
            self.member.applied(Applied(self.version, self.digest))
        self.say(
            "verdict", round=self.round, version=self.version, digest=self.digest, outcome=verdict.outcome
        )


def new_member(address: str, peer: str, **changes: Any) -> Member:
    values: dict[str, Any] = {"run": "run", "token": TOKEN, "on_abort": lambda op: None} | changes
    return Member(address=address, peer=peer, **values)


class CoordinatorThread:
    """A real coordinator in a thread of the test, with its events in a list."""

    def __init__(
        self,
        journal: Path | EtcdPlace,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: bytes = TOKEN,
        run_settings: dict[str, Scalar] | None = SETTINGS,
        trust: Trust | None = None,
        first_tokens: Sequence[TokenMade] = (),
        **changes: Any,
    ) -> None:
        self.events: list[Event] = []
        self.result: tuple[int, str] | None = None
        self.failure: BaseException | None = None
        self.host, self.port = host, port
        self._settings = CoordinatorSettings(**({"run": "run", "timeouts": QUICK} | changes))
        self._journal, self._token, self._run_settings = journal, token, run_settings
        self._trust, self._first_tokens = trust, first_tokens
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)

    def __enter__(self) -> CoordinatorThread:
        self._thread.start()
        assert self._listening.wait(10), "the coordinator does not listen"
        if self.failure is not None:
            raise self.failure
        return self

    def stand_by(self) -> CoordinatorThread:
        """As `__enter__`, for one that does not lead yet; for use in a `with` statement."""
        self._thread.start()
        stood_by = self.seen(CoordinatorStoodBy)
        assert isinstance(stood_by, CoordinatorStoodBy)
        self.port = split_address(stood_by.address)[1]
        return self

    def leads(self, within_s: float) -> None:
        """Wait until one that stood by leads."""
        assert self._listening.wait(within_s), f"it does not lead within {within_s} s: {self.events}"
        assert self.failure is None

    def __exit__(self, *caught: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self.wait()

    def wait(self, within_s: float = 15.0) -> tuple[int, str]:
        """Until it is over; returns its exit code and reason."""
        self._thread.join(within_s)
        assert not self._thread.is_alive(), "the coordinator does not end"
        if self.failure is not None:
            raise self.failure
        assert self.result is not None
        return self.result

    def seen(self, kind: type[Event], within_s: float = 10.0) -> Event:
        """The first event of a kind, waited for."""
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            for event in self.events:
                if isinstance(event, kind):
                    return event
            time.sleep(0.01)
        raise AssertionError(f"no {kind.__name__} in {within_s} s: {self.events}")

    def _main(self) -> None:
        try:
            self.result = asyncio.run(self._serve())
        except BaseException as error:
            self.failure = error
        finally:
            self._listening.set()

    async def _serve(self) -> tuple[int, str]:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()

        def ready(host: str, port: int) -> None:
            self.port = port
            self._listening.set()

        return await serve(
            self._settings,
            host=self.host,
            port=self.port,
            token=self._token,
            trust=self._trust,
            first_tokens=self._first_tokens,
            journal_path=self._journal,
            run_settings=self._run_settings,
            nested_settings={"outer": {"lr": 0.7}},
            events=EventLog("coordinator", lambda wall_s, source, event: self.events.append(event)),
            make_lanes=make_lanes,
            ready=ready,
            stop=self._stop,
        )


# ---- as a process ------------------------------------------------------------------------------------------


def _say(what: str, **values: object) -> None:
    print(json.dumps({"what": what, **values}), flush=True)


def _peer(told: dict[str, Any]) -> None:
    def on_abort(op: OpId) -> None:
        _say("abort", op=str(op))

    member = new_member(told["address"], told["peer"], token=told["token"].encode(), on_abort=on_abort)
    fake = FakePeer(member, told["peer"], _say, told["reduce_s"])
    try:
        fake.join()
        fake.run(told["rounds"])
        member.leave("all rounds are done", done=True)
        _say("left")
    except AtollError as error:
        member.close()
        _say("failed", code=error.exit_code, reason=str(error))


async def _coordinate(told: dict[str, Any]) -> None:
    settings = CoordinatorSettings(run="run", start_peers=told["start_peers"], timeouts=QUICK)
    code, reason = await serve(
        settings,
        host="127.0.0.1",
        port=told["port"],
        token=told["token"].encode(),
        journal_path=Path(told["journal"]),
        run_settings=None,
        nested_settings=None,
        events=EventLog("coordinator", JsonLinesSink(Path(told["events"]))),
        make_lanes=make_lanes,
        ready=lambda host, port: _say("listening", port=port),
        stop=asyncio.Event(),
    )
    _say("over", code=code, reason=reason)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    told = json.loads(sys.stdin.readline())
    if told["role"] == "peer":
        _peer(told)
    else:
        asyncio.run(_coordinate(told))
