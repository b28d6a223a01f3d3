"""Messages in parts: what is packed is put together again, within limits, whatever comes."""

from __future__ import annotations

import random

import pytest

from atoll.membership.frames import MAX_MESSAGE_BYTES, PART_BYTES, Assembler, OversizedError, pack
from atoll.membership.messages import Refused, encode


def sized(num_bytes: int) -> Refused:
    """A message that is encoded in exactly `num_bytes`."""
    text = "x" * (num_bytes - len(encode(Refused("token", "x" * 70_000))) + 70_000)
    message = Refused("token", text)
    assert len(encode(message)) == num_bytes
    return message


def put_together(parts: list[bytes]) -> bytes | None:
    assembler = Assembler()
    *firsts, last = [assembler.feed(part) for part in parts]
    assert firsts == [None] * len(firsts)
    return last


def test_a_small_message_travels_as_it_is() -> None:
    message = Refused("token", "no")
    assert pack(message) == [encode(message)]


@pytest.mark.parametrize(
    "num_bytes", [PART_BYTES + 2_000, 3 * (PART_BYTES - 2), 1_000_000, MAX_MESSAGE_BYTES]
)
def test_a_large_message_comes_back_whole(num_bytes: int) -> None:
    message = sized(num_bytes)
    parts = pack(message)
    assert len(parts) > 1
    assert max(map(len, parts)) <= PART_BYTES
    assert put_together(parts) == encode(message)


def test_one_assembler_serves_message_after_message() -> None:
    assembler = Assembler()
    for message in (sized(200_000), Refused("token", "no"), sized(100_000)):
        assert [assembler.feed(part) for part in pack(message)][-1] == encode(message)


def test_a_message_above_the_limit_is_not_packed() -> None:
    with pytest.raises(OversizedError, match=r"a Refused of \d+ bytes is above the limit of 4194304"):
        pack(sized(MAX_MESSAGE_BYTES + 1))


def test_endless_parts_are_refused() -> None:
    part = b"\xc1\x01" + bytes(PART_BYTES - 2)
    with pytest.raises(OversizedError, match="above the limit"):
        put_together([part] * (MAX_MESSAGE_BYTES // PART_BYTES + 2))


def test_a_message_between_parts_is_refused() -> None:
    assembler = Assembler()
    assembler.feed(b"\xc1\x01abc")
    with pytest.raises(OversizedError, match="before the last part"):
        assembler.feed(encode(Refused("token", "no")))


def test_random_bytes_never_do_more_than_refuse() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(200):
        assembler = Assembler()
        for _ in range(10):
            try:
                assembler.feed(
                    rng.choice([b"", b"\xc1", b"\xc1\x01", b"\xc1\x00"]) + rng.randbytes(rng.randrange(9))
                )
            except OversizedError:
                break
