"""Messages in parts: no WebSocket message is larger than `PART_BYTES`, so none makes a reader hold more.

A small message travels as it is. A larger one (a declaration with a long layout, a plan with many ranges) is
cut into parts, each opened by a byte that msgpack never uses and a flag: 1 "more follows", 0 "this is the
last".
"""

from __future__ import annotations

from collections.abc import Iterator

from atoll.membership.messages import Message, encode

PART_BYTES = 64 << 10
MAX_MESSAGE_BYTES = 4 << 20

_MARK = 0xC1  # "never used" in the msgpack specification
_HEADER_BYTES = 2


class OversizedError(Exception):
    """A message is larger than its limit, or its parts make no sense."""


def pack(message: Message) -> list[bytes]:
    """The WebSocket messages that carry `message`. Raises OversizedError above MAX_MESSAGE_BYTES."""
    data = encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise OversizedError(
            f"a {type(message).__name__} of {len(data)} bytes is above the limit of {MAX_MESSAGE_BYTES}"
        )
    return [data] if len(data) <= PART_BYTES else list(_parts(data))


def _parts(data: bytes) -> Iterator[bytes]:
    room = PART_BYTES - _HEADER_BYTES
    for start in range(0, len(data), room):
        more = start + room < len(data)
        yield bytes((_MARK, more)) + data[start : start + room]


class Assembler:
    """Puts the parts of one connection together again; holds at most MAX_MESSAGE_BYTES."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, part: bytes) -> bytes | None:
        """The whole message that this part completes, or None. Raises OversizedError."""
        if not part or part[0] != _MARK:
            if self._held:
                raise OversizedError("a message began before the last part of the one before it")
            return part
        if len(part) <= _HEADER_BYTES or len(self._held) + len(part) > MAX_MESSAGE_BYTES + _HEADER_BYTES:
            raise OversizedError(
                f"a message in parts is empty or above the limit of {MAX_MESSAGE_BYTES} bytes"
            )
        self._held += part[_HEADER_BYTES:]
        if part[1]:
            return None
        whole, self._held = bytes(self._held), bytearray()
        return whole
