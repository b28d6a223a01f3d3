"""Records of the DHT: only what the run's authority signed, in its one encoding, is one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import ConfigError
from atoll.network.authority import Authority
from atoll.network.dht_record import MAX_BYTES, RecordError, is_dialable, key_of, read, sign

AUTHORITY = Authority.new("run")
ADDRESSES = ("10.0.0.5:7070", "[2001:db8::5]:7070", "east.example.org:7070")
GENUINE = sign(AUTHORITY, run="run", addresses=ADDRESSES, term=3, sequence=1)


def test_it_says_where_the_coordinator_is_and_lies_under_its_own_key() -> None:
    record = read(GENUINE)
    assert (record.run, record.addresses, record.age) == ("run", ADDRESSES, (3, 1))
    assert record.key == key_of("run", AUTHORITY.fingerprint)
    assert len(record.key) == 20
    assert record.key != key_of("run", Authority.new("run").fingerprint)
    assert record.key != key_of("other", AUTHORITY.fingerprint)


@given(
    position=st.integers(0, len(GENUINE) - 1),
    flip=st.integers(1, 255),
    cut=st.booleans(),
)
def test_no_changed_byte_is_accepted(position: int, flip: int, cut: bool) -> None:
    changed = bytearray(GENUINE)
    changed[position] ^= flip
    with pytest.raises(RecordError):
        read(bytes(changed))
    with pytest.raises(RecordError):
        read(GENUINE[:position] if cut else GENUINE[:position] + bytes([flip]) + GENUINE[position:])


@given(
    run=st.text(max_size=20),
    addresses=st.lists(st.sampled_from([*ADDRESSES, "evil:1"]), min_size=1, max_size=8),
    term=st.integers(0, 2**63 - 1),
    sequence=st.integers(0, 2**63 - 1),
    key=st.sampled_from([read(GENUINE).public_key, bytes(32), b"\x01" + bytes(31)]),
)
def test_no_changed_field_is_accepted(
    run: str, addresses: list[str], term: int, sequence: int, key: bytes
) -> None:
    genuine = read(GENUINE)
    forged = msgspec.structs.replace(
        genuine, run=run, addresses=tuple(addresses), term=term, sequence=sequence, public_key=key
    )
    if forged != genuine:
        with pytest.raises(RecordError):
            read(msgspec.msgpack.encode(forged))


@given(st.binary(max_size=2 * MAX_BYTES))
def test_noise_is_no_record(noise: bytes) -> None:
    with pytest.raises(RecordError):
        read(noise)


def test_another_encoding_of_the_same_is_not_accepted() -> None:
    fields = msgspec.msgpack.decode(GENUINE)
    assert msgspec.msgpack.encode(fields) == GENUINE
    longer = b"\xdc\x00" + bytes([len(fields)]) + GENUINE[1:]  # an array with a length of 16 bits
    assert msgspec.msgpack.decode(longer) == fields
    with pytest.raises(RecordError, match="encoding"):
        read(longer)
    with pytest.raises(RecordError, match="no record"):
        read(b"\x97" + GENUINE[1:] + b"\xc0")  # one field more


def test_what_is_too_long_is_not_parsed() -> None:
    with pytest.raises(RecordError, match="too long"):
        read(bytes(MAX_BYTES + 1))
    with pytest.raises(RecordError, match="no record"):
        read(b"\x91" * MAX_BYTES)  # nested as deep as it goes


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0:7070",
        "[::]:7070",
        "::1:7070",
        "host",
        "host:0",
        "host:70707",
        "a b:1",
        "224.0.0.1:5",
        "[host]:5",
    ],
)
def test_an_address_that_leads_nowhere_is_not_signed(address: str) -> None:
    assert not is_dialable(address)
    with pytest.raises(ConfigError, match="cannot be published"):
        sign(AUTHORITY, run="run", addresses=[address], term=1, sequence=0)


def test_a_record_that_no_datagram_holds_is_not_signed() -> None:
    with pytest.raises(ConfigError, match="at most 8"):
        sign(
            AUTHORITY, run="run", addresses=[f"{'x' * 200}.org:{n}" for n in range(1, 8)], term=1, sequence=0
        )
    with pytest.raises(ConfigError, match="at most 8"):
        sign(AUTHORITY, run="run", addresses=[f"10.0.0.{n}:1" for n in range(1, 10)], term=1, sequence=0)
