"""What the engine does with peers that hold the key and misbehave, and with strangers on its port."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import psutil
import pytest

from atoll.comm.native import NativeCommunicator
from atoll.plan.grid import Grid
from atoll.values import Edge, OpId, Plan
from support.engines import KEY, Engines, Running, decoded, encoded, open_engine, plan_for
from support.raw_peer import ACK_CONTRIBUTION, BEGIN, CONTRIBUTION, FINISHED, Frame, RawPeer, connect, hello
from support.slack import SLACK_S

pytestmark = pytest.mark.usefixtures("stream")
GRID = Grid.of([512])
VALUES = encoded(GRID, "fp32", 3.0).tobytes()
HALF = len(VALUES) // 2  # two roots: chunk 0 belongs to the raw peer "a", chunk 1 to the engine "m"


def until(what: str, holds: object, within_s: float = 5.0 + SLACK_S) -> None:
    """Waits for something that happens on another thread, but not for ever."""
    end = time.monotonic() + within_s
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < end, what
        time.sleep(0.005)


def hear_all(connection: socket.socket) -> bytes:
    """What the other end says until it hangs up; a TimeoutError if it does not."""
    heard = b""
    try:
        while more := connection.recv(4096):
            heard += more
    except (ConnectionResetError, ssl.SSLError):
        pass
    return heard


@contextmanager
def engine(connect_timeout_s: float = 5.0) -> Iterator[NativeCommunicator]:
    comm = open_engine("m", connect_timeout_s=connect_timeout_s)
    try:
        yield comm
    finally:
        comm.close()


def plan_of(comm: NativeCommunicator, op: OpId, deadline_s: float = 10.0) -> Plan:
    return plan_for({"a": 1, "m": comm.port}, GRID.numel, "fp32", op, deadline_s=deadline_s)


@contextmanager
def op_with_raw_peer() -> Iterator[tuple[NativeCommunicator, Running, RawPeer, Frame]]:
    """An op of two, begun on both ends; the engine contributes 1.0."""
    op = OpId(1, 0)
    with engine() as comm:
        running = Running(comm, plan_of(comm, op), GRID, encoded(GRID, "fp32", 1.0))
        raw = RawPeer(comm.port, "a", "m", KEY)
        try:
            yield comm, running, raw, raw.begin()
        finally:
            comm.abort(op)
            raw.close()


def contribution(begin: Frame) -> Frame:
    return replace(begin, kind=CONTRIBUTION, chunk=1, payload=VALUES[HALF:])


def finished(begin: Frame, value: float = 2.0) -> Frame:
    return replace(begin, kind=FINISHED, chunk=0, payload=encoded(GRID, "fp32", value).tobytes()[:HALF])


def test_a_peer_in_another_language_completes_an_op() -> None:
    with op_with_raw_peer() as (_, running, raw, begin):
        theirs = raw.read_frame()
        assert (theirs.kind, theirs.chunk) == (CONTRIBUTION, 0)
        assert theirs.payload == encoded(GRID, "fp32", 1.0).tobytes()[:HALF]
        raw.ack(theirs)
        raw.send(contribution(begin))
        frames = [raw.read_frame(), raw.read_frame()]
        result = next(frame for frame in frames if frame.kind == FINISHED)
        assert any(frame.kind == ACK_CONTRIBUTION for frame in frames)
        assert result.payload == encoded(GRID, "fp32", 2.0).tobytes()[HALF:]
        raw.ack(result)
        raw.send(finished(begin))
        assert running.report().ok, running.report().reason
        np.testing.assert_array_equal(decoded(GRID, "fp32", running.result), np.float32(2.0))


def test_nothing_is_sent_before_the_receiver_has_begun() -> None:
    with engine() as comm:
        running = Running(comm, plan_of(comm, OpId(1, 0), deadline_s=1.0), GRID, encoded(GRID, "fp32", 1.0))
        raw = RawPeer(comm.port, "a", "m", KEY)
        assert raw.read_frame().kind == BEGIN
        raw.socket.settimeout(0.6)
        with pytest.raises(TimeoutError):
            raw.read_frame()  # pings are skipped; data would be a frame
        report = running.report()
        assert Edge("m", "a") in report.broken
        raw.close()


def test_a_peer_that_begins_first_is_remembered() -> None:
    """Its begin comes before this engine knows the op; the op runs when it is started."""
    with op_with_raw_peer() as (comm, first, raw, begin):
        early = replace(begin, op=(1, 1, 0, 0))
        raw.send(early)
        raw.send(replace(begin, op=(1, 2, 0, 0), plan_digest=1))
        time.sleep(0.1)
        second = Running(comm, plan_of(comm, OpId(1, 1)), GRID, encoded(GRID, "fp32", 1.0))
        frames = [raw.read_frame() for _ in range(3)]
        assert {(frame.kind, frame.op[1]) for frame in frames} == {
            (CONTRIBUTION, 0),
            (BEGIN, 1),
            (CONTRIBUTION, 1),
        }
        third = Running(comm, plan_of(comm, OpId(1, 2)), GRID, encoded(GRID, "fp32", 1.0))
        assert "another plan" in third.report().reason
        comm.abort(OpId(1, 1))
        assert not second.report().ok
        comm.abort(OpId(1, 0))
        assert not first.report().ok


def test_a_damaged_payload_breaks_the_link_and_enters_no_sum() -> None:
    with op_with_raw_peer() as (_, running, raw, begin):
        honest = contribution(begin)
        damaged = bytearray(honest.payload)
        damaged[100] ^= 0x10
        raw.socket.sendall(honest.pack()[:64] + bytes(damaged))
        report = running.report()
        assert not report.ok
        assert "chunk 1 of op t1/r0/f0/a0 does not match its checksum" in report.reason
        assert Edge("a", "m") in report.broken
        assert raw.was_closed()


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("a length that is not the chunk's", {"payload": VALUES}),
        ("a chunk that does not exist", {"chunk": 7}),
        ("a chunk that is the sender's own to sum", {"chunk": 0}),
        ("a finished chunk from a node that is not its root", {"kind": FINISHED}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_frames_that_do_not_fit_the_plan_break_the_link(what: str, change: dict[str, object]) -> None:
    with op_with_raw_peer() as (_, running, raw, begin):
        raw.send(replace(contribution(begin), **change))  # type: ignore[arg-type]
        report = running.report()
        assert not report.ok, what
        assert "does not fit the plan of op t1/r0/f0/a0" in report.reason
        assert raw.was_closed()


def test_a_lying_length_breaks_the_link_before_anything_is_allocated() -> None:
    before = psutil.Process().memory_info().rss
    with op_with_raw_peer() as (_, running, raw, begin):
        raw.send(contribution(begin), length=0xFFFFFFFF)
        assert "claims 4294967295 bytes" in running.report().reason
        assert raw.was_closed()
        assert psutil.Process().memory_info().rss - before < 64 << 20


def test_noise_after_the_hello_breaks_the_link() -> None:
    with op_with_raw_peer() as (_, running, raw, _begin):
        raw.socket.sendall(bytes(range(64)))
        assert "a frame does not begin as one" in running.report().reason
        assert raw.was_closed()


def test_frames_of_ops_that_are_unknown_over_or_under_another_plan_have_no_effect() -> None:
    with op_with_raw_peer() as (comm, running, raw, begin):
        poison = replace(contribution(begin), payload=encoded(GRID, "fp32", 999.0).tobytes()[HALF:])
        raw.send(replace(poison, op=(1, 0, 0, 1)))  # a later attempt
        raw.send(replace(poison, op=(0, 0, 0, 0)))  # an older term
        raw.send(replace(poison, plan_digest=begin.plan_digest ^ 1))
        raw.send(contribution(begin))
        frame = raw.read_frame()
        while frame.kind != FINISHED:
            frame = raw.read_frame()
        assert frame.payload == encoded(GRID, "fp32", 2.0).tobytes()[HALF:]
        assert comm.stats()["dropped_frames"] == 3
        raw.send(replace(poison))  # a duplicate, with other bytes
        raw.send(finished(begin))
        raw.send(finished(begin, 777.0))
        raw.ack(Frame(CONTRIBUTION, begin.op, begin.plan_digest, 0))
        raw.ack(frame)
        assert running.report().ok
        np.testing.assert_array_equal(decoded(GRID, "fp32", running.result), np.float32(2.0))
        raw.send(finished(begin, 777.0))  # the op is over, its buffer the caller's
        until("the frame is dropped", lambda: comm.stats()["dropped_frames"] == 4)
        np.testing.assert_array_equal(decoded(GRID, "fp32", running.result), np.float32(2.0))


def test_a_half_sent_chunk_of_an_aborted_op_is_sent_to_its_end_from_a_copy() -> None:
    """After abort the caller may overwrite its buffer; what is on the wire stays what its checksum says."""
    grid = Grid.of([64 << 20 >> 2])  # 64 MiB: more than the socket takes while nobody reads
    with engine() as comm:
        values = encoded(grid, "fp32", 1.5)
        plan = plan_for({"a": 1, "m": comm.port}, grid.numel, "fp32", OpId(1, 0), roots=["a"])
        running = Running(comm, plan, grid, values)
        raw = RawPeer(comm.port, "a", "m", KEY)
        raw.begin()
        sent = 0
        while sent != (sent := comm.stats()["sent_bytes"]) or sent < 64 << 10:
            time.sleep(0.1)  # until the socket is full
        begin = time.monotonic()
        comm.abort(plan.op)
        assert running.report().reason == "aborted"
        assert time.monotonic() - begin < 0.1 + SLACK_S
        values[:] = 0xFF
        raw.socket.settimeout(0.5)
        frames = list(raw.read_frames())
        for frame in frames:
            np.testing.assert_array_equal(np.frombuffer(frame.payload, dtype=np.float32), np.float32(1.5))
        assert frames
        assert comm.stats()["connections"] == 1
        raw.close()


STRANGERS = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "noise": bytes((i * 197 + 13) % 256 for i in range(4096)),
    "zeros": bytes(4096),
    "another run": hello("another", "a", "m"),
    "another target": hello("test", "a", "q"),
    "a lying name length": hello("test", "a", "m")[:16] + b"\xff\xff\xff\xff" + hello("test", "a", "m")[20:],
    "no proof": hello("test", "a", "m") + bytes(32),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_strangers_are_closed_at_once_and_learn_nothing(what: str) -> None:
    with engine() as comm:
        with connect(comm.port) as stranger:
            stranger.sendall(STRANGERS[what])
            heard = hear_all(stranger)
            assert len(heard) == (256 if what == "no proof" else 0)
        until("counted", lambda: comm.stats()["refused_hellos"] == 1)
        assert comm.stats()["connections"] == 0


def test_a_recorded_hello_is_worth_nothing_on_another_connection() -> None:
    with op_with_raw_peer() as (comm, _running, _raw, _begin):
        recorded = hello("test", "a", "m", nonce=bytes(32))
        for _ in range(2):
            with connect(comm.port) as replayer:
                replayer.sendall(recorded)
                answer = replayer.recv(256)
                assert len(answer) == 256
                replayer.sendall(bytes(32))
                assert hear_all(replayer) == b""


def test_silence_is_closed_after_the_connect_timeout() -> None:
    with engine(connect_timeout_s=0.5) as comm:
        with socket.create_connection(("127.0.0.1", comm.port), timeout=5.0) as silent:
            begin = time.monotonic()
            assert silent.recv(1) == b""
            assert time.monotonic() - begin < 0.5 + SLACK_S
        until("descriptors come back", lambda: comm.stats()["open_fds"] == 3)


def test_a_crowd_of_idle_strangers_takes_few_descriptors_and_does_not_keep_peers_out() -> None:
    with Engines(2, connect_timeout_s=3.0) as engines:
        target = engines.comms["p1"]
        crowd = [socket.create_connection(("127.0.0.1", target.port), timeout=3.0) for _ in range(200)]
        try:
            until("the crowd is seen", lambda: target.stats()["refused_hellos"] >= 200 - 64)
            assert target.stats()["open_fds"] <= 3 + 64
            engines.reduce(engines.plan(GRID, "fp32", OpId(1, 0)), GRID)
            until("descriptors come back", lambda: target.stats()["open_fds"] == 4)
        finally:
            for one in crowd:
                one.close()
