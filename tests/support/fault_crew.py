"""Engines in processes of their own, a proxy on every link, and plans for them as a coordinator would make them."""

from __future__ import annotations

import math
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from itertools import combinations
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np
import psutil
from msgspec import structs

from atoll.comm.trees import reduce_here
from atoll.plan.grid import Grid
from atoll.plan.lanes import direct_lanes
from atoll.plan.planner import choose
from atoll.values import Contribution, Edge, Lane, OpId, Plan, PlanRequest, Range, RankInfo
from support.engines import KEY
from support.fault_peer import Answer, Done, Holds, Order, Reached
from support.proxy import DOWN, UP, Proxy
from support.slack import SLACK_S
from support.tied import tied

PEER = Path(__file__).parent / "fault_peer.py"
ABORT_AFTER_S = 0.3


class Process:
    """One peer's process; a thread reads what it says."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.process = subprocess.Popen(
            tied(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._answers: queue.Queue[Answer | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        port = self._next(30.0).port
        assert port is not None
        self.port = port

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(msgspec.json.decode(line, type=Answer))
        self._answers.put(None)

    def _next(self, within_s: float) -> Answer:
        try:
            answer = self._answers.get(timeout=within_s)
        except queue.Empty:
            raise AssertionError(f"{self.name} said nothing within {within_s:g} s: it hangs") from None
        return self._expect(answer)

    def _expect(self, answer: Answer | None) -> Answer:
        assert answer is not None, f"{self.name} ended with {self.process.wait()}"
        return answer

    def order(self, order: Order) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(order).decode() + "\n")
        self.process.stdin.flush()

    def done(self, op: OpId, within_s: float) -> Done:
        """The end of an op; those of earlier ones, of a peer that was frozen, are passed over."""
        done = self.poll(op, within_s)
        assert done is not None, f"{self.name} said nothing within {within_s:g} s: it hangs"
        return done

    def poll(self, op: OpId, within_s: float) -> Done | None:
        """As `done`; None if it has not come yet."""
        end = time.monotonic() + within_s
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return None
            done = self._expect(answer).done
            if done is not None and done.op == op:
                return done

    def holds(self) -> Holds:
        self.order(Order())
        while (holds := self._next(10.0 + SLACK_S).holds) is None:
            pass
        return holds

    def dial(self, others: dict[str, RankInfo], trial_s: float) -> Reached:
        """Whom it can dial."""
        self.order(Order(dial=others, trial_s=trial_s))
        while (reached := self._next(trial_s + 10.0 + SLACK_S).reached) is None:
            pass
        return reached

    def abort(self, op: OpId) -> None:
        self.order(Order(abort=op))

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def suffered(self, how: signal.Signals, within_s: float = 10.0) -> bool:
        """Whether the peer's own fault fired: it was killed, or it is stopped."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            if how == signal.SIGKILL and self.process.poll() == -how:
                return True
            if how == signal.SIGSTOP and self._status() == psutil.STATUS_STOPPED:
                return True
            time.sleep(0.01)
        return False

    def _status(self) -> str:
        return psutil.Process(self.process.pid).status() if self.process.poll() is None else ""

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Crew:
    """Peers `p0`, `p1`, ..., each a process; `p<i>` contributes 2**i. Subclasses say where they run."""

    def __init__(self, world: int, connect_timeout_s: float) -> None:
        self.names = tuple(f"p{index}" for index in range(world))
        self._connect_timeout_s = connect_timeout_s
        self.peers = {name: self.start(name) for name in self.names}
        self._rounds = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for peer in self.peers.values():
            peer.end()

    def command(self, name: str, host: str) -> list[str]:
        return [sys.executable, str(PEER), name, KEY.hex(), str(self._connect_timeout_s), host]

    def start(self, name: str) -> Process:
        raise NotImplementedError

    def address(self, reader: str, name: str) -> tuple[str, int]:
        """Where `reader` finds `name`."""
        raise NotImplementedError

    def replace(self, name: str) -> None:
        """A fresh process under the same name."""
        self.peers[name].end()
        self.peers[name] = self.start(name)

    def next_round(self) -> int:
        self._rounds += 1
        return self._rounds

    def plan(
        self,
        reader: str,
        op: OpId,
        members: Sequence[str],
        *,
        numel: int,
        lanes: Sequence[Lane] = (),
        contributors: Sequence[str] = (),
        deadline_s: float = 3.0,
        chunk_bytes: int = 1 << 18,
        connections: int = 1,
        scale: float = 1.0,
    ) -> Plan:
        """As `reader` gets it: the same for all, but for the addresses of the others.

        Contributions of a round and a `scale` have one digest, so that an attempt may use what an earlier one brought.
        """
        members = tuple(sorted(members))
        found = {name: self.address(reader, name) for name in members}
        return Plan(
            op=op,
            base_version=0,
            members=members,
            contributions=tuple(
                Contribution(name, 1, f"{op.round} {name} {scale}")
                for name in sorted(contributors or members)
            ),
            ranks={name: (RankInfo(*found[name], (Range(0, numel),)),) for name in members},
            lanes=tuple(lanes or direct_lanes(members, ())),
            codec="fp32",
            deadline_s=deadline_s,
            chunk_bytes=chunk_bytes,
            connections=connections,
        )

    def begin(
        self,
        op: OpId,
        members: Sequence[str],
        halt: dict[str, tuple[str, int]] | None = None,
        scale: float = 1.0,
        **options: object,
    ) -> Plan:
        """All members begin; `halt` says who sends itself which signal after how many bytes.

        `scale`, a power of two, tells the contributions of one attempt from those of another.
        """
        plan = None
        for name in members:
            plan = self.plan(name, op, members, scale=scale, **options)  # type: ignore[arg-type]
            self.give(name, plan, halt=(halt or {}).get(name, ("", 0)), scale=scale)
        assert plan is not None
        return plan

    def give(
        self,
        name: str,
        plan: Plan,
        *,
        halt: tuple[str, int] = ("", 0),
        scale: float = 1.0,
        sizes: tuple[int, ...] = (),
    ) -> None:
        """One member begins by this plan. `sizes`: its parameters, if not one that fills its range."""
        contributes = name in {contribution.peer for contribution in plan.contributions}
        value = scale * 2.0 ** self.names.index(name)
        how, after = halt
        self.peers[name].order(
            Order(plan=plan, value=value, contribute=contributes, halt=how, after=after, sizes=sizes)
        )

    def ends(self, plan: Plan, survivors: Collection[str]) -> dict[str, Done]:
        """How the op ended on the survivors: within its deadline, or the test fails.

        As by a coordinator that is `ABORT_AFTER_S` away, the first failure aborts the attempt for the rest.
        """
        end = time.monotonic() + plan.deadline_s + SLACK_S
        abort_at = math.inf
        done: dict[str, Done] = {}
        while missing := sorted(set(survivors) - done.keys()):
            now = time.monotonic()
            assert now < end, f"{', '.join(missing)}: the op did not end: it hangs"
            if now > abort_at:
                for name in missing:
                    self.peers[name].abort(plan.op)
                end, abort_at = now + 0.1 + SLACK_S, math.inf
            for name in missing:
                if (said := self.peers[name].poll(plan.op, 0.002)) is not None:
                    done[name] = said
                    if not said.report.ok:
                        abort_at = min(abort_at, time.monotonic() + ABORT_AFTER_S)
        return done

    def mean_of(self, plan: Plan, scale: float = 1.0) -> float:
        """The value that holds exactly if each contributor is in it once and nobody else."""
        names = [contribution.peer for contribution in plan.contributions]
        total = np.float32(sum(scale * 2.0 ** self.names.index(name) for name in names))
        return float(total / np.float32(len(names)))

    def values_of(self, plan: Plan) -> set[float]:
        """What elements may be, to the bit: that mean, as each lane's tree rounds it on its way."""
        grid = Grid.of([64])
        updates = {
            contribution.peer: np.full(64, 2.0 ** self.names.index(contribution.peer), np.float32).view(
                np.uint8
            )
            for contribution in plan.contributions
        }
        found = set()
        ranks = {name: (RankInfo("", 0, (Range(0, grid.numel),)),) for name in plan.members}
        for lane in plan.lanes:
            finished = reduce_here(structs.replace(plan, lanes=(lane,), ranks=ranks), grid, updates)
            assert finished is not None
            found |= {float(value) for value in finished.view(np.float32)}
        assert all(abs(value - self.mean_of(plan)) < 1e-5 * value for value in found)
        return found

    def retry(
        self,
        op: OpId,
        members: Sequence[str],
        broken: Collection[Edge],
        previous: Plan | None = None,
        **options: object,
    ) -> Plan:
        """The next attempt as a coordinator plans it: lanes avoid broken links; who cannot be served is left out."""
        names = tuple(members)
        request = PlanRequest(names, names, 1 << 20, "fp32", broken=frozenset(broken), previous=previous)
        choice = choose(request)
        left = [name for name in names if name not in choice.dropped]
        return self.begin(op, left, lanes=choice.lanes, **options)


class FaultCrew(Crew):
    """All on loopback. Whoever of a pair dials does so through the pair's proxy."""

    def __init__(self, world: int, connect_timeout_s: float = 1.0) -> None:
        super().__init__(world, connect_timeout_s)
        self.proxies = {
            pair: Proxy(*(self.peers[name].port for name in pair)) for pair in combinations(self.names, 2)
        }

    def __enter__(self) -> FaultCrew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        for proxy in self.proxies.values():
            proxy.close()

    def start(self, name: str) -> Process:
        return Process(name, self.command(name, "127.0.0.1"))

    def address(self, reader: str, name: str) -> tuple[str, int]:
        if reader == name:
            return "127.0.0.1", self.peers[name].port
        return "127.0.0.1", self.proxy(reader, name).port(UP if reader < name else DOWN)

    def replace(self, name: str) -> None:
        super().replace(name)
        for (lower, upper), proxy in self.proxies.items():
            if name in (lower, upper):
                proxy.targets[UP if name == upper else DOWN] = self.peers[name].port

    def proxy(self, a: str, b: str) -> Proxy:
        return self.proxies[min(a, b), max(a, b)]

    def recover(self) -> None:
        """Links heal, who is stopped goes on, who is dead comes back."""
        self.heal()
        for name, peer in self.peers.items():
            if peer.process.poll() is None:
                peer.send(signal.SIGCONT)
            else:
                self.replace(name)

    def heal(self) -> None:
        for proxy in self.proxies.values():
            proxy.arm(None)
