"""What a conductor and its members say to each other: JSON, one message a line, over any pair of descriptors."""

from __future__ import annotations

import os
import select
import time
from typing import TypeVar

import msgspec

from atoll.errors import DeadlineExceeded, Unreachable
from atoll.values import LinkRate, Plan

MAX_LINE_BYTES = 1 << 20


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all orders and answers; the tag is the name of the class."""


class Open(Message, frozen=True):
    """Order: be member `index` of `world`, open an engine under this key. `host`: the address to listen on.

    `tls`: (certificates, key, authorities) of a second engine that speaks TLS.
    """

    index: int
    world: int
    key: bytes
    host: str
    tls: tuple[str, str, str] | None = None


class Opened(Message, frozen=True):
    """Where the member's engines and its plain socket listen; without TLS there is one engine."""

    engine_port: int
    tls_port: int
    plain_port: int


class Meet(Message, frozen=True):
    """Order: here are all members' addresses, plain ones (host, port); bring up these rivals."""

    plain: tuple[tuple[str, int], ...]
    rivals: tuple[str, ...] = ()
    rendezvous: str = ""


class Met(Message, frozen=True):
    """All rivals are up; `rendezvous` is where the others find the first member's."""

    rendezvous: str = ""


class Fill(Message, frozen=True):
    """Order: have `numel` fp32 values, drawn by `seed`."""

    numel: int
    seed: int


class Reduce(Message, frozen=True):
    """Order: one all-reduce by this plan, from fp32 to fp32. `check`: compare a sample with the exact mean."""

    plan: Plan
    tls: bool = False
    check: bool = False


class Rival(Message, frozen=True):
    """Order: one all-reduce of the same values by another program."""

    name: str
    check: bool = False


class Exchange(Message, frozen=True):
    """Order: send `num_bytes` to each of `targets` over plain TCP, `streams` connections each, and receive as much."""

    num_bytes: int
    targets: tuple[int, ...]
    streams: int = 1


class Echo(Message, frozen=True):
    """Order: time `count` round trips of one byte to member `target`; its member is told to answer."""

    target: int
    count: int
    answer: bool


class Took(Message, frozen=True):
    """What an order took. `cpu_s` is of the whole process; bytes are None where nobody counted them.

    `extra_bytes`: how much memory the process had at most, above what it had before.
    """

    seconds: float = 0.0
    cpu_s: float = 0.0
    wire_s: float = 0.0
    sent_bytes: int | None = None
    extra_bytes: int | None = None
    rel_error: float | None = None
    digest: str = ""
    links: tuple[LinkRate, ...] = ()
    round_trips_s: tuple[float, ...] = ()


class Failed(Message, frozen=True):
    """The member could not do it; a sentence."""

    reason: str


Order = Open | Meet | Fill | Reduce | Rival | Exchange | Echo
Answer = Opened | Met | Took | Failed

M = TypeVar("M", bound=Message)


class Channel:
    """One end of a conversation. Both descriptors belong to whoever made it."""

    def __init__(self, read_fd: int, write_fd: int, name: str) -> None:
        self.name = name
        self._read_fd, self._write_fd = read_fd, write_fd
        self._heard = bytearray()

    def send(self, message: Message) -> None:
        """Blocks while the other end does not read. Raises Unreachable if it is gone."""
        left = memoryview(msgspec.json.encode(message) + b"\n")
        try:
            while left:
                left = left[os.write(self._write_fd, left) :]
        except OSError as error:
            raise Unreachable(f"{self.name} is gone: {error.strerror}") from None

    def receive(self, kinds: object, within_s: float | None) -> Message | None:
        """The next message, of one of `kinds`; None if the other end has closed. `within_s` None: for ever.

        Raises DeadlineExceeded, and Unreachable for what is not a message.
        """
        line = self._line(None if within_s is None else time.monotonic() + within_s, within_s)
        if line is None:
            return None
        try:
            return msgspec.json.decode(line, type=kinds)  # type: ignore[arg-type]
        except msgspec.MsgspecError as error:
            raise Unreachable(f"{self.name} said what is no message: {error}") from None

    def _line(self, deadline_s: float | None, within_s: float | None) -> bytes | None:
        poll = select.poll()
        poll.register(self._read_fd, select.POLLIN)
        while (end := self._heard.find(b"\n")) < 0:
            if len(self._heard) > MAX_LINE_BYTES:
                raise Unreachable(f"{self.name} said more than {MAX_LINE_BYTES} bytes in one line")
            left_ms = None if deadline_s is None else max(0.0, deadline_s - time.monotonic()) * 1e3
            if not poll.poll(left_ms):
                raise DeadlineExceeded(f"{self.name} did not answer within {within_s:g} s")
            try:
                more = os.read(self._read_fd, 1 << 16)
            except OSError:
                more = b""
            if not more:
                return None
            self._heard += more
        line = bytes(self._heard[:end])
        del self._heard[: end + 1]
        return line
