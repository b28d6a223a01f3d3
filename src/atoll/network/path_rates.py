"""What a path to another peer carries, and which of two paths to take: a short transfer over TCP, and a choice.

Both ends are `atoll vpn` processes. Only a member is served: it proves that it holds the private key of a public key in
the mesh (HMAC under what the two keys share), and is proved the same; what it then sends is counted and dropped. Served
are `MAX_STRANGERS` connections at once that have proved nothing, each for `PROVE_S`, and those of one member, so that
measurements do not disturb each other. Runs on the event loop of whoever asks.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from atoll.network.wireguard_keys import KEY_BYTES, KeyPair

STREAMS = 4  # one connection fills no long path
SEND_S = 1.5
MAX_STREAM_BYTES = 64 << 20
PROVE_S = 5.0
MEASURE_S = 12.0
MAX_STRANGERS = 32
FASTER = 1.1
"""A path is left for another that is faster by so much: two measurements of one path differ by as much."""
DROPPED = 0.5
"""An engine's link that carries less than this part of the best it did lately is worth another look."""
AGAIN_S = 60.0
"""After a drop, measured again at most so often."""
OLD_S = 1800.0

_HELLO = b"atoll vpn rate 1"
_NONCE_BYTES = 32
_GO, _BUSY = b"\x01", b"\x00"
_PIECE = bytes(128 << 10)


@dataclass(frozen=True, slots=True)
class Choice:
    """The paths to one peer as they were measured at `measured_s`: bytes per second, 0 for one that leads nowhere.

    `path` is "vpn" or "direct", `best_seen` the most that the engine's link carried since, in bytes per second.
    """

    path: str
    reason: str
    direct_rate: float
    vpn_rate: float
    measured_s: float
    best_seen: float = 0.0


def choose(direct_rate: float, vpn_rate: float, now_s: float, held: Choice | None = None) -> Choice:
    """Of two rates (bytes per second, 0: not reached) the faster path; the one `held` unless the other is clearly
    faster, and the VPN where nothing says otherwise: there every packet is sealed."""
    path = held.path if held is not None else "vpn"
    rates = {"direct": direct_rate, "vpn": vpn_rate}
    other = "direct" if path == "vpn" else "vpn"
    if rates[other] > FASTER * rates[path]:
        path, other = other, path
    if not rates[path]:
        path, reason = "vpn", "neither path was reached"
    elif not rates[other]:
        reason = f"the {other} path is not reached"
    else:
        ratio = rates[path] / rates[other]
        compared = f"{ratio:.1f} times as fast as" if ratio > FASTER else "about as fast as"
        reason = f"the {path} path is {compared} the {other} one"
    return Choice(path, reason, direct_rate, vpn_rate, now_s)


def worth_measuring(held: Choice | None, link_rate: float, now_s: float) -> tuple[str, Choice | None]:
    """Why the paths are to be measured now ("": they are not), and what was held with what the engine saw taken in.

    `link_rate` is what the engine's link to that peer carried lately, 0 if it is not known.
    """
    if held is None:
        return "never measured", None
    held = replace(held, best_seen=max(held.best_seen, link_rate))
    age_s = now_s - held.measured_s
    if age_s > OLD_S:
        return f"measured {age_s / 60:.0f} min ago", held
    if age_s > AGAIN_S and not (held.direct_rate or held.vpn_rate):
        return "not reached last time", held
    if age_s > AGAIN_S and 0 < link_rate < DROPPED * held.best_seen:
        return f"its rate fell to {link_rate / held.best_seen:.0%} of the best", held
    return "", held


class BusyError(Exception):
    """The other end measures with somebody else just now."""


class RateServer:
    """Counts what members send. `is_member(public key)` says who is one."""

    def __init__(self, keys: KeyPair, is_member: Callable[[bytes], bool]) -> None:
        self._keys, self._is_member = keys, is_member
        self._strangers = self._served = 0
        self._serving = b""

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection. For asyncio.start_server."""
        try:
            if self._strangers < MAX_STRANGERS:
                self._strangers += 1
                try:
                    public = await asyncio.wait_for(self._prove(reader, writer), PROVE_S)
                finally:
                    self._strangers -= 1
                await self._serve(public, reader, writer)
        except (OSError, EOFError, ValueError):
            pass  # it went away, was too slow, or spoke otherwise: nothing is owed to it
        finally:
            writer.transport.abort()

    async def _serve(self, public: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a member, unless another one is served."""
        if self._served and (public != self._serving or self._served >= STREAMS):
            writer.write(_BUSY)
            await writer.drain()
            return
        self._serving = public
        self._served += 1
        try:
            writer.write(_GO)
            await asyncio.wait_for(self._count(reader, writer), MEASURE_S)
        finally:
            self._served -= 1

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """The member's public key. Raises ValueError for anybody else."""
        hello = await reader.readexactly(len(_HELLO) + KEY_BYTES + _NONCE_BYTES)
        public, theirs = hello[len(_HELLO) :][:KEY_BYTES], hello[-_NONCE_BYTES:]
        if not hello.startswith(_HELLO) or not self._is_member(public):
            raise ValueError("not a member")
        mine, shared = secrets.token_bytes(_NONCE_BYTES), self._keys.shared_with(public)
        writer.write(mine + _proof(shared, b"server", theirs, mine))
        said = await reader.readexactly(_NONCE_BYTES)
        if not hmac.compare_digest(said, _proof(shared, b"client", theirs, mine)):
            raise ValueError("not that member")
        return public

    @staticmethod
    async def _count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the other end has sent all; then it is told the rate over the second half of the time."""
        begun_s, total = time.monotonic(), 0
        marks = [(0.0, 0)]
        while (piece := await reader.read(1 << 20)) and total < 2 * MAX_STREAM_BYTES:
            total += len(piece)
            since_s = time.monotonic() - begun_s
            if since_s - marks[-1][0] >= 0.01:
                marks.append((since_s, total))
        ended_s = time.monotonic() - begun_s
        half_s, half = next(mark for mark in marks[::-1] if mark[0] <= ended_s / 2)
        rate = (total - half) / max(ended_s - half_s, 1e-3)
        writer.write(struct.pack("<d", rate))
        await writer.drain()
        writer.write_eof()
        await reader.read(1)  # until it has been read


async def measure(keys: KeyPair, public: bytes, host: str, port: int) -> tuple[float, str]:
    """What this machine can send to the peer with this public key, at host:port, in bytes per second, over STREAMS
    connections for about SEND_S; (0, why) if it is not reached. Takes at most MEASURE_S. Raises BusyError."""
    try:
        async with asyncio.timeout(MEASURE_S):
            async with asyncio.TaskGroup() as group:
                sending = [group.create_task(_send(keys, public, host, port)) for _ in range(STREAMS)]
            return sum(each.result() for each in sending), ""
    except TimeoutError:
        return 0.0, f"no answer in {MEASURE_S:g} s"
    except ExceptionGroup as group:
        first = group.exceptions[0]
        if isinstance(first, BusyError):
            raise first from None
        return 0.0, _phrase(first)


def _phrase(error: Exception) -> str:
    match error:
        case TimeoutError():
            return f"no answer in {PROVE_S:g} s"
        case EOFError():
            return "it closed the connection"
        case OSError() | ValueError():
            return (getattr(error, "strerror", None) or str(error)).lower()
    raise error


async def _send(keys: KeyPair, public: bytes, host: str, port: int) -> float:
    async with asyncio.timeout(PROVE_S):
        reader, writer = await asyncio.open_connection(host, port)
    try:
        mine, shared = secrets.token_bytes(_NONCE_BYTES), keys.shared_with(public)
        async with asyncio.timeout(PROVE_S):
            writer.write(_HELLO + keys.public + mine)
            said = await reader.readexactly(2 * _NONCE_BYTES)
            theirs, proof = said[:_NONCE_BYTES], said[_NONCE_BYTES:]
            if not hmac.compare_digest(proof, _proof(shared, b"server", mine, theirs)):
                raise ValueError("it is not that peer")
            writer.write(_proof(shared, b"client", mine, theirs))
            if await reader.readexactly(1) == _BUSY:
                raise BusyError
        begun_s, sent = time.monotonic(), 0
        while time.monotonic() - begun_s < SEND_S and sent < MAX_STREAM_BYTES:
            writer.write(_PIECE)
            sent += len(_PIECE)
            await writer.drain()
        writer.write_eof()
        (rate,) = struct.unpack("<d", await reader.readexactly(8))
        return float(rate)
    finally:
        writer.transport.abort()


def _proof(shared: bytes, direction: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(shared, b"atoll vpn rate " + direction + client_nonce + server_nonce, hashlib.sha256)


def order(choice: Choice | None, direct: str, vpn: str) -> tuple[str, ...]:
    """A peer's addresses, the one to prefer first."""
    return (direct, vpn) if choice is not None and choice.path == "direct" else (vpn, direct)
