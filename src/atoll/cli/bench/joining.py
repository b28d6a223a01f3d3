"""Members on other machines: they dial the conductor and prove the token, as it proves it to them.

A stranger costs the conductor one connection and at most `HELLO_S`; what it says is bounded before it is read.
"""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack

from atoll.cli.bench.crew import Seat, Spawned
from atoll.cli.bench.member import serve
from atoll.cli.bench.messages import Channel, Message
from atoll.errors import AtollError, DeadlineExceeded, LocalError, Refused, Unreachable
from atoll.membership.auth import Handshake, check_token, new_nonce

PROTOCOL = 1
HELLO_S = 5.0
WAIT_S = 600.0
_RUN, _PEER = "bench", "member"


class Challenge(Message, frozen=True):
    """The conductor's first word."""

    nonce: bytes


class Proof(Message, frozen=True):
    """The member's answer: its own nonce, and the proof of the token over both."""

    nonce: bytes
    proof: bytes


class Welcome(Message, frozen=True):
    """The conductor's proof over the same nonces."""

    proof: bytes


class Listener:
    """Where members join. The conductor's own member listens on the address by which the first joiner came."""

    def __init__(self, host: str, port: int, token: bytes) -> None:
        """Raises ConfigError (token), LocalError (the address cannot be had)."""
        check_token(token)
        self._token, self._stack = token, ExitStack()
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = self._stack.enter_context(socket.create_server((host, port), family=family))
        except OSError as error:
            raise LocalError(
                f"cannot listen on {host} port {port}: {error.strerror}; choose another"
            ) from None

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def gather(self, world: int, spawned: Spawned) -> list[Seat]:
        """Wait for `world` - 1 joiners, then add a member of this machine as the first. Raises DeadlineExceeded."""
        deadline_s = time.monotonic() + WAIT_S
        joined: list[Seat] = []
        own_host = ""
        while len(joined) < world - 1:
            self._socket.settimeout(max(0.001, deadline_s - time.monotonic()))
            try:
                connection, address = self._socket.accept()
            except TimeoutError:
                raise DeadlineExceeded(
                    f"{len(joined)} of {world - 1} members joined within {WAIT_S:g} s"
                ) from None
            channel = _channel(connection, f"{address[0]} port {address[1]}")
            if not self._admit(channel):
                connection.close()
                continue
            self._stack.callback(connection.close)
            own_host = own_host or connection.getsockname()[0]
            joined.append(Seat(channel, address[0]))
        return [spawned.seat("the conductor's own member", own_host or "127.0.0.1"), *joined]

    def _admit(self, channel: Channel) -> bool:
        nonce = new_nonce()
        try:
            channel.send(Challenge(nonce=nonce))
            said = channel.receive(Proof, HELLO_S)
            if not isinstance(said, Proof):
                return False
            handshake = _handshake(nonce, said.nonce)
            if not handshake.peer_proof_fits(self._token, said.proof):
                return False
            channel.send(Welcome(proof=handshake.coordinator_proof(self._token, bytes(32))))
        except AtollError:
            return False
        return True


def join(host: str, port: int, token: bytes) -> None:
    """Be a member of the benchmark that `host` conducts, until it is over. Raises Unreachable, Refused."""
    check_token(token)
    try:
        connection = socket.create_connection((host, port), timeout=HELLO_S)
    except OSError as error:
        reason = error.strerror or str(error)
        raise Unreachable(
            f"{host} port {port}: {reason}; is `atoll bench ... --listen` running there?"
        ) from None
    with connection:
        connection.settimeout(None)
        channel = _channel(connection, "the conductor")
        challenge = channel.receive(Challenge, HELLO_S)
        if not isinstance(challenge, Challenge):
            raise Unreachable(f"{host} port {port} conducts no benchmark")
        nonce = new_nonce()
        handshake = _handshake(challenge.nonce, nonce)
        channel.send(Proof(nonce=nonce, proof=handshake.peer_proof(token)))
        welcome = channel.receive(Welcome, HELLO_S)
        if not isinstance(welcome, Welcome) or not handshake.coordinator_proof_fits(
            token, bytes(32), welcome.proof
        ):
            raise Refused("the conductor has another token; ATOLL_TOKEN must be the same on all machines")
        serve(channel)


def _channel(connection: socket.socket, name: str) -> Channel:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Channel(connection.fileno(), connection.fileno(), name)


def _handshake(server_nonce: bytes, client_nonce: bytes) -> Handshake:
    return Handshake(
        protocol=PROTOCOL,
        run=_RUN,
        peer=_PEER,
        incarnation="",
        server_nonce=server_nonce,
        client_nonce=client_nonce,
    )
