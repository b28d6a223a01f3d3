"""What somebody who wants to be examined and the coordinator say to each other, after the proof of the token.

The asker is a machine that thinks of taking part: it asks what the coordinator sees of it and of the run, and has it
dial back. Its connection has a path of its own and begins as an operator's does.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from atoll.membership.messages import Challenge, Message, Refused
from atoll.membership.operator import OperatorWelcome
from atoll.values import LinkRate, RankInfo

EXAMINATION_PATH = "/v1/examination"
NONCE_BYTES = 32
CHALLENGE_BYTES = 16
ECHO_BYTES = 32
MOST_DIALS = 4


def echo(nonce: bytes, challenge: bytes) -> bytes:
    """What the asker's listener answers to a dial-back: only it and the coordinator know the nonce."""
    return hmac.new(nonce, b"atoll examination" + challenge, hashlib.sha256).digest()


class ExamineMe(Message, frozen=True):
    """Asker: tell what you see. `nonce` is drawn by the asker, for its listener's answers and for `mapping_ports`."""

    nonce: bytes


class DialBack(Message, frozen=True):
    """Asker: connect to this port of the address that you see of me. MOST_DIALS of them for each examination."""

    port: int


class DialedBack(Message, frozen=True):
    """Coordinator: whether the asker's own listener answered there; if not, `why`, as a short phrase."""

    port: int
    reached: bool
    why: str


class MemberSeen(msgspec.Struct, frozen=True):
    """A member of the run, and what it announces of its rank 0, without what that owns; None if it told nothing."""

    peer: str
    rank: RankInfo | None


class Examined(Message, frozen=True):
    """Coordinator: what it sees of the asker, and of the run.

    `seen_host` and `seen_port` are the source of the asker's connection. `wall_time_s` is the coordinator's clock,
    seconds since the epoch. Two more ports, `mapping_ports`, answer a connection that says the nonce with the source
    they see, until the examination ends; () if they could not be opened.

    `wire_bytes` is the size of one encoded update (0 before the first declaration), `elements` how many numbers it
    holds, `links` the rates seen so far, `round_s` how long the last rounds took, None before two. `inner_steps` 0: not
    known.
    """

    run: str
    package: str
    seen_host: str
    seen_port: int
    wall_time_s: float
    mapping_ports: tuple[int, ...]
    members: tuple[MemberSeen, ...]
    num_members: int
    links: tuple[LinkRate, ...]
    wire_bytes: int
    elements: int
    codec: str
    topology: str
    connections: int
    inner_steps: int
    round_s: float | None
    max_up: dict[str, int]
    max_down: dict[str, int]


_from_asker = msgspec.msgpack.Decoder(ExamineMe | DialBack)
_to_asker = msgspec.msgpack.Decoder(Challenge | OperatorWelcome | Refused | Examined | DialedBack)

Answer = Challenge | OperatorWelcome | Refused | Examined | DialedBack


def decode_from_asker(data: bytes) -> ExamineMe | DialBack:
    """Raises msgspec.ValidationError or msgspec.DecodeError for anything else."""
    return _from_asker.decode(data)


def decode_answer(data: bytes) -> Answer:
    """Raises msgspec.ValidationError or msgspec.DecodeError for anything else."""
    return _to_asker.decode(data)
