"""The conductor's side: a crew of members, orders to all of them at once, their answers."""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, TypeVar

from atoll.cli.bench.messages import Answer, Channel, Failed, Meet, Message, Met, Open, Opened, Order
from atoll.cli.children import dies_with_parent
from atoll.config.environment import for_child
from atoll.errors import LocalError

COMMAND = (sys.executable, "-m", "atoll.cli.bench.member")
START_S = 120.0
A = TypeVar("A", bound=Message)


@dataclass(frozen=True)
class Seat:
    """Where one member sits: the channel to it and the address at which the others reach it."""

    channel: Channel
    host: str


class Crew:
    """Members that are open and have met. `seats` belong to whoever made them; `close` ends this side only."""

    def __init__(self, seats: Sequence[Seat], tls: tuple[str, str, str] | None = None) -> None:
        self.seats = tuple(seats)
        key = secrets.token_bytes(32)
        world = len(seats)
        opened = self.ask(
            [
                Open(index=index, world=world, key=key, host=seat.host, tls=tls)
                for index, seat in enumerate(seats)
            ],
            Opened,
            START_S,
        )
        self.engines = tuple((seat.host, one.engine_port) for seat, one in zip(seats, opened, strict=True))
        self.tls_engines = tuple((seat.host, one.tls_port) for seat, one in zip(seats, opened, strict=True))
        self._plain = tuple((seat.host, one.plain_port) for seat, one in zip(seats, opened, strict=True))

    def meet(self, rivals: Sequence[str] = ()) -> None:
        """Tell all where the others are, and bring up the rivals: each at the first member before the others."""
        meet = Meet(plain=self._plain)
        self.ask([meet] * len(self.seats), Met, START_S)
        for rival in rivals:
            first = self._ask_some([0], [Meet(plain=self._plain, rivals=(rival,))], Met, START_S)[0]
            others = list(range(1, len(self.seats)))
            order = Meet(plain=self._plain, rivals=(rival,), rendezvous=first.rendezvous)
            self._ask_some(others, [order] * len(others), Met, START_S)

    def ask(self, orders: Sequence[Order], answer: type[A], within_s: float) -> list[A]:
        """One order to each, then all answers. Raises LocalError with the first member's reason that failed."""
        return self._ask_some(range(len(self.seats)), orders, answer, within_s)

    def ask_all(self, order: Order, answer: type[A], within_s: float) -> list[A]:
        return self.ask([order] * len(self.seats), answer, within_s)

    def _ask_some(
        self, indices: Sequence[int], orders: Sequence[Order], answer: type[A], within_s: float
    ) -> list[A]:
        for index, order in zip(indices, orders, strict=True):
            self.seats[index].channel.send(order)
        answers, failures = [], []
        for index in indices:
            said = self.seats[index].channel.receive(Answer, within_s)
            if isinstance(said, answer):
                answers.append(said)
            else:
                reason = said.reason if isinstance(said, Failed) else "it ended"
                failures.append(f"{self.seats[index].channel.name}: {reason}")
        if failures:
            raise LocalError(f"the benchmark failed at {failures[0]}")
        return answers


class Spawned:
    """Members as child processes; they end when this closes, or with this process, however that ends."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> Spawned:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def seat(self, name: str, host: str, popen: Callable[..., subprocess.Popen[bytes]] | None = None) -> Seat:
        """Start one. `popen(command, **options)` starts it elsewhere, e.g. in another network namespace."""
        log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by the stack)
        self._stack.callback(log.close)
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        process = (popen or _here)(COMMAND, **options)
        self._stack.callback(_end, process, log)
        assert process.stdin is not None
        assert process.stdout is not None
        return Seat(Channel(process.stdout.fileno(), process.stdin.fileno(), name), host)


def _here(command: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # type: ignore[call-overload]
        command,
        env={**for_child(""), "GLOO_SOCKET_IFNAME": "lo"},
        start_new_session=True,
        preexec_fn=dies_with_parent(),
        **options,
    )


def _end(process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    """Close its orders, which ends it; what it said on stderr is passed on if it did not end well."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    try:
        code = process.wait(timeout=10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    if code:
        log.seek(0)
        sys.stderr.write(log.read().decode(errors="replace"))
