"""One member: a process that does what the conductor orders, and says how long it took.

Started by the conductor (`python -m atoll.cli.bench.member`, orders on stdin, answers on stdout), or from another
machine by `atoll bench ... --join`.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack, closing

import msgspec
import numpy as np

from atoll import kernels
from atoll.cli.bench.memory import MemoryWatch
from atoll.cli.bench.messages import (
    Answer,
    Channel,
    Echo,
    Exchange,
    Failed,
    Fill,
    Meet,
    Met,
    Open,
    Opened,
    Order,
    Reduce,
    Rival,
    Took,
)
from atoll.cli.bench.plain import PlainSockets
from atoll.cli.bench.rivals import RIVALS, RivalGroup
from atoll.cli.bench.values import fill, relative_error
from atoll.codecs.views import is_plain, wire_view
from atoll.comm.native import NativeCommunicator, Tls
from atoll.errors import AtollError, LocalError
from atoll.plan.grid import Grid
from atoll.values import Plan

RUN = "bench"
WITHIN_S = 600.0


class Stopwatch:
    """Seconds by the wall, and of this process on all its threads."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def took(self) -> Took:
        return Took(seconds=time.perf_counter() - self._wall, cpu_s=time.process_time() - self._cpu)


class Member:
    """Its engine, its plain sockets, its values, and the rivals that were asked for."""

    def __init__(self, order: Open) -> None:
        self._index, self._world = order.index, order.world
        with ExitStack() as stack:
            self._comm = stack.enter_context(closing(_engine(order, None)))
            self._secure = self._comm
            if order.tls is not None:
                self._secure = stack.enter_context(closing(_engine(order, Tls(*order.tls))))
            self._plain = PlainSockets(order.index, order.host, order.key)
            stack.callback(self._plain.close)
            self._stack = stack.pop_all()
        self._host = order.host
        self._rivals: dict[str, RivalGroup] = {}
        self._seed = 0
        self._values = self._mean = np.empty(0, dtype=np.float32)
        self._encoded = self._result = np.empty(0, np.uint8)

    def opened(self) -> Opened:
        return Opened(engine_port=self._comm.port, tls_port=self._secure.port, plain_port=self._plain.port)

    def close(self) -> None:
        self._stack.close()

    def obey(self, order: Order) -> Answer:
        match order:
            case Meet():
                return self._meet(order)
            case Fill():
                return self._fill(order)
            case Reduce():
                return self._reduce(self._secure if order.tls else self._comm, order.plan, order.check)
            case Rival():
                return self._rival(order)
            case Exchange():
                watch = Stopwatch()
                seconds = self._plain.exchange(order.num_bytes, order.targets, order.streams, WITHIN_S)
                return Took(seconds=seconds, cpu_s=watch.took().cpu_s)
            case Echo():
                trips = self._plain.echo(order.target, order.count, order.answer, WITHIN_S)
                return Took(round_trips_s=trips)
        raise AssertionError(order)

    def _meet(self, order: Meet) -> Met:
        self._plain.meet(order.plain)
        rendezvous = order.rendezvous
        for name in order.rivals:
            group = RIVALS[name](self._index, self._world, self._host, rendezvous)
            self._rivals[name] = group
            self._stack.callback(group.close)
            rendezvous = group.rendezvous
        return Met(rendezvous=rendezvous)

    def _fill(self, order: Fill) -> Took:
        watch = Stopwatch()
        self._seed = order.seed
        self._values = np.empty(order.numel, dtype=np.float32)
        self._mean = np.full(order.numel, 0.0, dtype=np.float32)  # touched now, not when the clock runs
        fill(self._values, self._index, order.seed)
        self._encoded = self._result = np.empty(0, np.uint8)
        return watch.took()

    def _reduce(self, comm: NativeCommunicator, plan: Plan, check: bool) -> Answer:
        grid = Grid.of([len(self._values)])
        wire_bytes = grid.wire_bytes(plan.codec)
        plain = is_plain(plan.codec)
        if (
            len(self._result) != wire_bytes
        ):  # buffers are made before the clock starts, as a run makes them once
            self._result = wire_view(self._mean) if plain else np.full(wire_bytes, 0, np.uint8)
            self._encoded = wire_view(self._values) if plain else np.full(wire_bytes, 0, np.uint8)
        memory = MemoryWatch() if check else None
        watch = Stopwatch()
        # fp32 moves as it lies; a value that is not finite is refused where it is added up.
        if not plain and not kernels.encode(plan.codec, grid.boundaries, self._values, self._encoded):
            return Failed(reason=f"{plan.codec} refuses the values")
        report = comm.reduce(plan, grid, self._encoded, self._result)
        if not report.ok:
            return Failed(reason=report.reason)
        if not plain:
            kernels.decode(plan.codec, grid.boundaries, self._result, self._mean)
        took = watch.took()
        return msgspec.structs.replace(
            took,
            wire_s=report.stats.wire_s,
            sent_bytes=report.stats.sent_bytes,
            links=report.stats.links,
            extra_bytes=memory.extra_bytes() if memory else None,
            rel_error=self._error() if check else None,
            digest=kernels.digest_bytes(self._result).hex() if check else "",
        )

    def _rival(self, order: Rival) -> Took:
        group = self._rivals[order.name]
        group.load(self._values)
        watch = Stopwatch()
        group.all_reduce()
        took = watch.took()
        if not order.check:
            return took
        self._mean[:] = group.mean()
        digest = kernels.digest_bytes(self._mean.view(np.uint8)).hex()
        return msgspec.structs.replace(took, rel_error=self._error(), digest=digest)

    def _error(self) -> float:
        return relative_error(self._mean, self._world, self._seed)


def _engine(order: Open, tls: Tls | None) -> NativeCommunicator:
    return NativeCommunicator(
        run=RUN,
        peer=peer_name(order.index),
        rank=0,
        session_key=order.key,
        bind_host=order.host,
        tls=tls,
    )


def peer_name(index: int) -> str:
    return f"m{index:02d}"


def serve(channel: Channel) -> None:
    """Obey until the conductor closes the channel."""
    member: Member | None = None
    try:
        while (order := channel.receive(Order, None)) is not None:
            try:
                if isinstance(order, Open):
                    member = Member(order)
                    channel.send(member.opened())
                elif member is not None:
                    channel.send(member.obey(order))  # type: ignore[arg-type]
            except (AtollError, OSError, RuntimeError, ValueError, MemoryError) as error:
                channel.send(Failed(reason=f"{error or type(error).__name__}"))
    finally:
        if member is not None:
            member.close()


def main() -> None:
    """Orders on stdin, answers on stdout; whatever else is printed goes to stderr."""
    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        serve(Channel(0, answers, "the conductor"))
    except LocalError as error:
        print(f"atoll: error: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
