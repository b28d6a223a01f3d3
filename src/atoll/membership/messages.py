"""What a peer and the coordinator say to each other: msgspec structs, in msgpack, over one WebSocket.

Unknown fields are ignored and every struct carries a tag, so that later versions can add. Admission has two steps:
*connect* proves the run's token both ways; *declare* compares layout, settings and version. Nothing here carries
weights.
"""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.membership.compact import compact, whole
from atoll.membership.leases import Lease, Reads, SlotTable
from atoll.values import (
    Contribution,
    Edge,
    LinkRate,
    OpId,
    ParameterInfo,
    Plan,
    RankInfo,
    Source,
    TransferStats,
)

PROTOCOL = 4
Scalar = str | int | float | bool | None


class Message(msgspec.Struct, frozen=True, tag_field="m", tag=True):
    """Base of all messages."""


# ---- admission: connect ------------------------------------------------------------------------------------------


class Challenge(Message, frozen=True):
    """Coordinator, first word on a new connection."""

    protocol: int
    nonce: bytes


class Connect(Message, frozen=True):
    """Peer: who I am, and proof that I hold the run's token (HMAC over both nonces, run, peer, incarnation)."""

    protocol: int
    package: str
    run: str
    peer: str
    incarnation: str
    nonce: bytes
    proof: bytes


class Welcome(Message, frozen=True):
    """Coordinator: proof of the same token, the sealed session key for the engines, the run's settings.

    `settings` is the nested dict of the run's settings; flat, with dotted keys, if they are those that the first peer
    declared; None while no one has given any. `timeouts` are the coordinator's; peers adopt them. `seen_as` is the
    peer's address as seen. In `renew_s` seconds the peer should ask for another certificate; 0: it has none.
    """

    proof: bytes
    sealed_session_key: bytes
    term: int
    settings: dict[str, Any] | None
    timeouts: dict[str, float]
    seen_as: str
    renew_s: float = 0.0


class Refused(Message, frozen=True):
    """Coordinator: not admitted, or not any more. `kind` is token, protocol, run, peer, layout, settings, version,
    digest, late or evicted."""

    kind: str
    reason: str


# ---- admission: declare ------------------------------------------------------------------------------------------


class Declare(Message, frozen=True):
    """Peer: the state I hold. Sent once the model is built, and again after every reconnect.

    `settings` is flat (dotted keys). `round` is the last round this peer knows the verdict of; `pending` is the round
    it waits on with its `ready` (None in LOCAL). `term` is the highest that it had heard of before
    this connection, `version_term` the one under which it got its version; 0 for a new process. `applying`
    while it takes the outer step of `round`, which is not in `version` yet.

    Of its data: the text has `num_slots` (0: it needs no leases), of which it wishes to hold `wish`; `slots` is the
    table as of `version` as far as it knows, `leases` what it was told that it holds and may have read in. `own_data`
    is the digest of data that it reads alone.
    """

    layout: tuple[ParameterInfo, ...]
    settings: dict[str, Scalar]
    ranks: tuple[RankInfo, ...]
    version: int
    round: int
    digest: str
    step: int
    pending: Ready | None = None
    term: int = 0
    version_term: int = 0
    applying: bool = False
    num_slots: int = 0
    wish: int = 0
    slots: SlotTable | None = None
    leases: tuple[Lease, ...] = ()
    own_data: str = ""


class View(Message, frozen=True):
    """Coordinator: the membership as it is now. `started` once the run has all `start_peers`."""

    term: int
    version: int
    round: int
    members: tuple[str, ...]
    started: bool
    reason: str


# ---- catching up -----------------------------------------------------------------------------------------------


class CatchUp(Message, frozen=True):
    """Coordinator: you do not hold the newest version; fetch it. Said again whenever something in it changes.

    `version` is the newest and `round` the last that has a verdict. `digests` are the run's, by version, as far as they
    are agreed. `sources` are the sidecars of members. If not `trusted`, what the peer holds is wrong: only a snapshot
    will do.
    """

    term: int
    version: int
    round: int
    digests: dict[int, str]
    sources: tuple[Source, ...]
    trusted: bool
    reason: str


class SnapshotWanted(Message, frozen=True):
    """Peer, catching up: the updates after `version`, which I hold, are not to be had; have a snapshot staged."""

    version: int


class CaughtUp(Message, frozen=True):
    """Peer: the state I hold now. If that is the newest version, I am a member again."""

    version: int
    round: int
    digest: str
    step: int


class Serve(Message, frozen=True):
    """Coordinator, to members: a peer catches up, let your sidecar serve. With `stage`, stage a snapshot of `version`
    (or of the version you hold by then) at the next safe point."""

    version: int
    stage: bool


# ---- liveness ----------------------------------------------------------------------------------------------------


class Heartbeat(Message, frozen=True):
    """Peer, every `heartbeat_s`, from the trainer's own process. `step` shows progress; the rest is for people:
    `steps_in_round` of `round_steps` inner steps are made."""

    step: int
    phase: str
    steps_in_round: int = 0
    round_steps: int = 0


class HeartbeatAck(Message, frozen=True):
    """Coordinator: so that a peer notices a coordinator that is frozen or gone."""

    term: int


# ---- rates -------------------------------------------------------------------------------------------------------


class Probe(Message, frozen=True):
    """Coordinator, while no round runs: measure the links to these members, of which nothing is known. One after
    another, each with `num_bytes` over so many `connections`, and for `link_s` at most."""

    targets: dict[str, RankInfo]
    num_bytes: int
    connections: int
    link_s: float


class Probed(Message, frozen=True):
    """Peer: what those links carried; `failed` says, by target, why one was not measured."""

    links: tuple[LinkRate, ...]
    failed: dict[str, str]


# ---- who reaches whom --------------------------------------------------------------------------------------------


class Reach(Message, frozen=True):
    """Coordinator: dial these members, rank 0 of each, all at once and whoever's turn it is; tell what came of it after
    `trial_s` at most."""

    targets: dict[str, RankInfo]
    trial_s: float


class Reached(Message, frozen=True):
    """Peer: which of them said the right hello, at which address (`where`), and why the others did not."""

    where: dict[str, str]
    failed: dict[str, str]


# ---- a round -----------------------------------------------------------------------------------------------------


class Freeze(Message, frozen=True):
    """Coordinator, policy `deadline`: the round closes; contribute what you have at your next safe point."""

    term: int
    round: int


class Ready(Message, frozen=True):
    """Peer: frozen, update encoded. `reads` is what it read since its last committed work, as of the frozen step; it
    wishes to hold `wish` data slots in the round after this.

    `update_digest` is that of the encoded update: what is sent again in a later attempt is told by it. `train_s` is how
    long the `steps` took, by this peer's own clock; `round_steps` how many the schedule has for the round after this.
    """

    round: int
    version: int
    digest: str
    tokens: int
    steps: int
    norm: float
    finite: bool
    reads: Reads = ()
    wish: int = 0
    update_digest: str = ""
    train_s: float = 0.0
    round_steps: int = 0


class Reduce(Message, frozen=True):
    """Coordinator: take part in this attempt."""

    plan: Plan


class Abort(Message, frozen=True):
    """Coordinator: give this attempt up; a verdict or a new attempt follows."""

    op: OpId
    reason: str


class Vote(Message, frozen=True):
    """Peer: "I hold the whole result, its digest is `digest`", or not ok, naming the broken edges."""

    op: OpId
    ok: bool
    digest: str
    broken: tuple[Edge, ...]
    reason: str
    stats: TransferStats


class Verdict(Message, frozen=True):
    """Coordinator, journaled before it is sent: the round's end.

    `outcome` is "committed" or "skipped". `version` is the version after it. `left_out` says why, by peer.
    `ends` means that the run is over with this round; `end_reason` says why. `inner_steps` are those of the next round,
    by member, where they differ by speed; who is not named makes the schedule's. `saves`: the version that it makes is
    to be a checkpoint, its shared part brought to the run's remote place by `uploader`. `slots`: positions in the data
    and leases from now on, of all peers; None if the run leases none.
    """

    op: OpId
    outcome: str
    version: int
    digest: str
    contributions: tuple[Contribution, ...]
    members: tuple[str, ...]
    left_out: dict[str, str]
    reason: str
    ends: bool = False
    end_reason: str = ""
    inner_steps: dict[str, int] = {}
    saves: bool = False
    uploader: str = ""
    slots: SlotTable | None = None


class SlotsWanted(Message, frozen=True):
    """Peer: what I hold is read, or will be before this round ends; lease me `more` slots. `number` counts the
    asking."""

    number: int
    more: int


class Leases(Message, frozen=True):
    """Coordinator: the leases changed within a round, and you are concerned. `answers` is the number of the SlotsWanted
    that this answers, 0 if none: what is leased now is all that there is."""

    slots: SlotTable
    answers: int = 0


class Applied(Message, frozen=True):
    """Peer: the outer step is done; this is the state's digest."""

    version: int
    digest: str


class Leave(Message, frozen=True):
    """Peer: goodbye. `done` means that all it was asked for is committed."""

    reason: str
    done: bool


class Ended(Message, frozen=True):
    """Coordinator: the run is over for this peer, or goes on without it."""

    kind: str
    reason: str


class AskToLeave(Message, frozen=True):
    """Coordinator, because an operator wishes it: say goodbye at your next safe point."""

    reason: str


class SessionKey(Message, frozen=True):
    """Coordinator: the key that engines and sidecars know each other by from now on. Only sent inside TLS."""

    key: bytes

    def __repr__(self) -> str:
        return "SessionKey()"


PeerMessage = (
    Connect
    | Declare
    | Heartbeat
    | Ready
    | Vote
    | Applied
    | SlotsWanted
    | SnapshotWanted
    | CaughtUp
    | Probed
    | Leave
    | Reached
)
CoordinatorMessage = (
    Challenge
    | Welcome
    | Refused
    | View
    | CatchUp
    | Serve
    | Probe
    | HeartbeatAck
    | Freeze
    | Reduce
    | Abort
    | Verdict
    | Leases
    | Ended
    | AskToLeave
    | SessionKey
    | Reach
)

_encoder = msgspec.msgpack.Encoder()
_peer_decoder = msgspec.msgpack.Decoder(PeerMessage)
_coordinator_decoder = msgspec.msgpack.Decoder(CoordinatorMessage)


def encode(message: Message) -> bytes:
    if isinstance(message, Reduce):
        message = Reduce(compact(message.plan))
    return _encoder.encode(message)


def decode_from_peer(data: bytes) -> PeerMessage:
    """Raises msgspec.ValidationError or msgspec.DecodeError for anything that is no peer message."""
    return _peer_decoder.decode(data)


def decode_from_coordinator(data: bytes) -> CoordinatorMessage:
    """Raises msgspec.ValidationError or msgspec.DecodeError for anything that is no coordinator message."""
    message = _coordinator_decoder.decode(data)
    if not isinstance(message, Reduce):
        return message
    try:
        return Reduce(whole(message.plan))
    except ValueError as error:
        raise msgspec.ValidationError(str(error)) from None
