"""Everything before proof: the limits on strangers, the TLS handshake, and the challenge.

A stranger is a connection that has not proved anything. There are at most `MAX_STRANGERS`, each for at most `PROVE_S`
and one message of `PART_BYTES`; when one more comes, the oldest goes. A peer proves in one round trip, so idle
strangers cannot keep it out. One source has few of them at a time (`source_limit`): the rest is hung up on before a
byte is read, and before any handshake. However many come, they cost one log line every `NOTE_EVERY_S`. Runs on the
event loop of whoever opens it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from aiohttp import WSMsgType, web

from atoll import log
from atoll.membership import auth, messages
from atoll.membership.messages import Challenge, Connect, Refused
from atoll.membership.register import VPN_SUFFIX, Register, Unknown
from atoll.membership.source_limit import SourceLimit

MAX_STRANGERS = 128
PROVE_S = 5.0
NOTE_EVERY_S = 10.0

_log = log.get(__name__)


class Gate:
    """Counts the strangers and shows them out."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        """With `tls` everybody has to shake hands before anything else."""
        self._tls = tls
        self._strangers: dict[asyncio.Transport, asyncio.TimerHandle] = {}
        self._shaking: dict[asyncio.Task[None], socket.socket] = {}
        self._sources = SourceLimit()
        self._closed = False
        self._turned_away = 0
        self._next_note_s = 0.0

    def turn_up(self, accepted: socket.socket, address: str, http: Callable[[], asyncio.Protocol]) -> None:
        """Somebody knocked: hang up at once on a source that had its share, else begin to listen to it."""
        loop = asyncio.get_running_loop()
        if not self._sources.take(address, loop.time()):
            self.note(address, "more connections than one source may open without a proof")
            _hang_up(accepted)
            return
        if len(self._shaking) >= MAX_STRANGERS:
            next(iter(self._shaking)).cancel()
        task = loop.create_task(self._shake_hands(accepted, address, http))
        self._shaking[task] = accepted
        task.add_done_callback(lambda done: self._shaking.pop(done, None))

    async def _shake_hands(
        self, accepted: socket.socket, address: str, http: Callable[[], asyncio.Protocol]
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.connect_accepted_socket(
                http, accepted, ssl=self._tls, ssl_handshake_timeout=PROVE_S if self._tls else None
            )
        except OSError as error:  # ssl.SSLError is one
            accepted.close()
            self.note(address, _tls_words(error))
        except asyncio.CancelledError:
            accepted.close()
            if not self._closed:
                self.note(address, f"{MAX_STRANGERS} connections at once had not shaken hands")
            raise
        else:
            self.enter(transport)

    def enter(self, transport: asyncio.Transport) -> None:
        """A connection was accepted: its time begins."""
        if len(self._strangers) >= MAX_STRANGERS:
            self._forget_closed()
        if len(self._strangers) >= MAX_STRANGERS:
            self._expel(
                next(iter(self._strangers)), f"{MAX_STRANGERS} connections at once had proved nothing"
            )
        timer = asyncio.get_running_loop().call_later(
            PROVE_S, self._expel, transport, f"no proof in {PROVE_S:g} s"
        )
        self._strangers[transport] = timer

    def proved(self, transport: asyncio.Transport) -> None:
        """The connection is a peer's from now on."""
        if timer := self._strangers.pop(transport, None):
            timer.cancel()
            self._sources.give_back(address_of(transport))

    def note(self, address: str, why: str) -> None:
        """Someone was turned away: counted, and told to people now and then."""
        self._turned_away += 1
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._next_note_s:
            _log.warning(
                "turned away %d connections that proved nothing; the latest from %s: %s",
                self._turned_away,
                address,
                why,
            )
            self._turned_away, self._next_note_s = 0, now_s + NOTE_EVERY_S

    async def turn_away(
        self, websocket: web.WebSocketResponse, transport: asyncio.Transport | None, refusal: Refused | None
    ) -> None:
        """Who proved nothing hears why, if there is anything to say."""
        self.note(address_of(transport), refusal.reason if refusal else "it did not speak our protocol")
        if refusal is not None:
            await websocket.send_bytes(messages.encode(refusal))
        await websocket.close()

    def close(self) -> None:
        """Show everyone out."""
        self._closed = True
        for task in tuple(self._shaking):
            task.cancel()
        for transport, timer in self._strangers.items():
            timer.cancel()
            transport.abort()
        self._strangers.clear()

    def _expel(self, transport: asyncio.Transport, why: str) -> None:
        self._strangers.pop(transport).cancel()
        if not transport.is_closing():
            self.note(address_of(transport), why)
            transport.abort()

    def _forget_closed(self) -> None:
        for transport in [each for each in self._strangers if each.is_closing()]:
            self._strangers.pop(transport).cancel()


async def admit_connections(
    listener: socket.socket, gate: Gate, protocol_factory: Callable[[], asyncio.Protocol]
) -> None:
    """Accept for ever; every connection enters the gate before a byte of it is read."""
    while True:
        await _readable(listener)
        try:
            accepted, address = listener.accept()
            accepted.setblocking(False)
        except BlockingIOError:
            continue  # it hung up again
        except OSError as error:
            if error.errno not in (
                errno.EMFILE,
                errno.ENFILE,
                errno.ECONNABORTED,
                errno.ENOBUFS,
                errno.ENOMEM,
            ):
                raise
            await asyncio.sleep(0.1)  # out of descriptors for now: strangers time out and give theirs back
            continue
        gate.turn_up(accepted, str(address[0]) if address else "", protocol_factory)


async def _readable(listener: socket.socket) -> None:
    """Until someone knocks. Unlike `loop.sock_accept` it may be cancelled in the very moment that someone does."""
    loop = asyncio.get_running_loop()
    knocked: asyncio.Future[None] = loop.create_future()
    loop.add_reader(listener, lambda: knocked.done() or knocked.set_result(None))
    try:
        await knocked
    finally:
        loop.remove_reader(listener)


@dataclass(frozen=True, slots=True)
class Proven:
    """Who came, the key that both ends prove it by, and, with TLS, the serial of its certificate."""

    handshake: auth.Handshake
    key: bytes = field(repr=False)
    serial: str = ""


async def prove(
    websocket: web.WebSocketResponse,
    transport: asyncio.Transport | None,
    run: str,
    register: Register,
    *,
    tls: bool,
) -> Proven | Refused | None:
    """Challenge a stranger. Returns what it proved, or what to refuse it with; None for nonsense.

    With `tls` its certificate is the proof: TLS has seen that it holds the key, here it is looked up whether the
    certificate still counts, and is this peer's.
    """
    nonce = auth.new_nonce()
    await websocket.send_bytes(messages.encode(Challenge(protocol=messages.PROTOCOL, nonce=nonce)))
    connect = await _receive_connect(websocket)
    if connect is None:
        return None
    if connect.protocol != messages.PROTOCOL:
        return Refused(
            "protocol",
            f"this peer speaks protocol {connect.protocol} (Atoll {connect.package[:32]!r}), the coordinator "
            f"{messages.PROTOCOL}; install the same version of Atoll on both",
        )
    handshake = auth.Handshake(
        protocol=connect.protocol,
        run=connect.run,
        peer=connect.peer,
        incarnation=connect.incarnation,
        server_nonce=nonce,
        client_nonce=connect.nonce,
    )
    try:
        key, serial = _by_certificate(transport, register, connect.peer) if tls else (register.key_of(""), "")
    except Unknown as unknown:
        return Refused("token", unknown.reason)
    if not handshake.peer_proof_fits(key, connect.proof):
        return Refused(
            "token", "the run token does not fit; give this peer and the coordinator the same token"
        )
    return _misfit(handshake, run) or Proven(handshake, key, serial)


def certificate_of(transport: asyncio.Transport | None) -> tuple[bytes, str]:
    """The certificate that was shown in the TLS handshake: DER and serial. Raises Unknown if there was none."""
    shown = transport.get_extra_info("ssl_object") if transport is not None else None
    der = shown.getpeercert(binary_form=True) if shown is not None else None
    if shown is None or not der:
        raise Unknown("a peer of this run needs a certificate; join with a token")
    return der, f"{int(shown.getpeercert()['serialNumber'], 16):x}"


def _by_certificate(transport: asyncio.Transport | None, register: Register, peer: str) -> tuple[bytes, str]:
    der, serial = certificate_of(transport)
    known = register.certificate(serial)
    if peer.endswith(VPN_SUFFIX):
        raise Unknown(
            f"{peer!r} is the name of a VPN's certificate, and no peer's; choose another one (local.peer)"
        )
    if known.peer != peer:
        raise Unknown(f"its certificate is that of {known.peer!r}, and it calls itself {peer!r}")
    return auth.certificate_key(der), serial


def _hang_up(accepted: socket.socket) -> None:
    """At once, and without the states that a polite end leaves behind in the kernel."""
    with contextlib.suppress(OSError):
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    accepted.close()


def _tls_words(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"no TLS handshake: {(error.reason or str(error)).lower().replace('_', ' ')}"
    return f"no TLS handshake: {error.strerror or error}"


def _misfit(handshake: auth.Handshake, run: str) -> Refused | None:
    """Said only to holders of the token."""
    if handshake.run != run:
        return Refused(
            "run", f"this coordinator runs {run!r}, not {handshake.run!r}; check run.name and the address"
        )
    for name in (handshake.peer, handshake.incarnation):
        if not (name.isprintable() and 0 < len(name) <= auth.MAX_NAME_CHARS):
            return Refused(
                "peer",
                f"{name[: auth.MAX_NAME_CHARS]!r} is no name: it needs 1 to {auth.MAX_NAME_CHARS} printable characters",
            )
    return None


async def _receive_connect(websocket: web.WebSocketResponse) -> Connect | None:
    frame = await websocket.receive()
    if frame.type is not WSMsgType.BINARY:
        return None
    try:
        message = messages.decode_from_peer(frame.data)
    except msgspec.MsgspecError:
        return None
    return message if isinstance(message, Connect) else None


def address_of(transport: asyncio.BaseTransport | None) -> str:
    """The other side's IP address, or "unknown" once it is gone."""
    name = transport.get_extra_info("peername") if transport else None
    return str(name[0]) if name else "unknown"
