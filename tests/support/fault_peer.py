"""A peer that is nothing but an engine, for many ops: orders on stdin, answers on stdout, JSON lines.

An order begins an op, aborts one, has it dial others, or asks what the process holds; ops run on threads of their own.
An answer to an op holds its report and the distinct values of its result: contributions are distinct powers of two, so
these tell whose updates are in it. With `halt` the process sends itself that signal as soon as `after` bytes have come
in.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import msgspec
import numpy as np

from atoll import kernels
from atoll.comm.native import NativeCommunicator
from atoll.plan.grid import Grid
from atoll.values import OpId, Plan, RankInfo, ReduceReport


class Order(msgspec.Struct, frozen=True):
    plan: Plan | None = None
    value: float = 0.0
    contribute: bool = True
    halt: str = ""
    after: int = 0
    abort: OpId | None = None
    sizes: tuple[int, ...] = ()
    dial: dict[str, RankInfo] = {}
    trial_s: float = 2.0


class Done(msgspec.Struct, frozen=True):
    """`values`: distinct elements of the result (the first 64); `seconds`: how long `reduce` took."""

    op: OpId
    report: ReduceReport
    values: tuple[float, ...]
    seconds: float


class Holds(msgspec.Struct, frozen=True):
    """What the process has open, and the engine's totals."""

    fds: int
    threads: int
    stats: dict[str, int]


class Reached(msgspec.Struct, frozen=True):
    """Where those were found that were to be dialled, and why others were not."""

    where: dict[str, str]
    failed: dict[str, str]


class Answer(msgspec.Struct, frozen=True):
    """Exactly one of: the port (the first line), an op's end, what is held, who was reached."""

    port: int | None = None
    done: Done | None = None
    holds: Holds | None = None
    reached: Reached | None = None


class Peer:
    def __init__(self, name: str, key: bytes, connect_timeout_s: float, host: str) -> None:
        self.name = name
        self.comm = NativeCommunicator(
            run="test",
            peer=name,
            rank=0,
            session_key=key,
            bind_host=host,
            connect_timeout_s=connect_timeout_s,
        )
        self._lock = threading.Lock()
        self.say(Answer(port=self.comm.port))

    def say(self, answer: Answer) -> None:
        with self._lock:
            sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
            sys.stdout.flush()

    def obey(self, order: Order) -> None:
        if order.abort is not None:
            self.comm.abort(order.abort)
        elif order.dial:
            self.say(Answer(reached=Reached(*self.comm.reach(order.dial, order.trial_s))))
        elif order.plan is not None:
            if order.halt:
                threading.Thread(target=self._halt, args=(order.halt, order.after), daemon=True).start()
            threading.Thread(target=self._reduce, args=(order, order.plan), daemon=True).start()
        else:
            fds, threads = len(os.listdir("/proc/self/fd")) - 1, len(os.listdir("/proc/self/task"))
            self.say(Answer(holds=Holds(fds, threads, self.comm.stats())))

    def _halt(self, how: str, after: int) -> None:
        begin = self.comm.stats()["received_bytes"]
        while self.comm.stats()["received_bytes"] - begin < after:
            time.sleep(0.0002)
        os.kill(os.getpid(), getattr(signal, how))

    def _reduce(self, order: Order, plan: Plan) -> None:
        numel = plan.ranks[self.name][0].ranges[0].stop
        grid = Grid.of(order.sizes or [numel])
        contribution = np.empty(grid.wire_bytes(plan.codec), dtype=np.uint8)
        result = np.full_like(contribution, 0xAA)
        kernels.encode(
            plan.codec, grid.boundaries, np.full(grid.numel, order.value, np.float32), contribution
        )
        begin = time.monotonic()
        report = self.comm.reduce(plan, grid, contribution if order.contribute else None, result)
        seconds = time.monotonic() - begin
        decoded = np.empty(grid.numel, dtype=np.float32)
        kernels.decode(plan.codec, grid.boundaries, result, decoded)
        values = tuple(float(value) for value in np.unique(decoded)[:64]) if report.ok else ()
        self.say(Answer(done=Done(plan.op, report, values, seconds)))


def main() -> None:
    name, key, connect_timeout_s, host = sys.argv[1:]
    peer = Peer(name, bytes.fromhex(key), float(connect_timeout_s), host)
    for line in sys.stdin:
        peer.obey(msgspec.json.decode(line, type=Order))
    peer.comm.close()


if __name__ == "__main__":
    main()
