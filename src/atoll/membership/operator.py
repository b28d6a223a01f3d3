"""What an operator and the coordinator say to each other: one request and one reply per connection.

An operator is a person, or a script, that looks at a run or gives it an order; it holds the run's token and is no
peer. Its connection has a path and proofs of its own (`auth.OperatorHandshake`), so that what proves a peer is worth
nothing here, and the other way round. msgspec structs in msgpack, as between peers and the coordinator.
"""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.membership.messages import Challenge, Message, Refused
from atoll.values import LinkRate

OPERATOR_PATH = "/v1/operator"

# ---- connect -----------------------------------------------------------------------------------------------------


class OperatorConnect(Message, frozen=True):
    """Operator, after the coordinator's Challenge: proof that it holds the token (HMAC over both nonces). `token` is
    the token's id; "" in a run that has but one."""

    protocol: int
    package: str
    nonce: bytes
    proof: bytes
    token: str = ""


class OperatorWelcome(Message, frozen=True):
    """Coordinator: proof of the same token."""

    proof: bytes


# ---- requests ----------------------------------------------------------------------------------------------------


class StatusWanted(Message, frozen=True):
    """Tell how the run stands."""


class StopRun(Message, frozen=True):
    """Make the open round the last; all peers end with exit 0."""

    reason: str


class LeavePeer(Message, frozen=True):
    """Ask this peer to say goodbye at its next safe point; it ends with exit 0."""

    peer: str
    reason: str


class EvictPeer(Message, frozen=True):
    """Send this peer away at once (it ends with exit 5), and refuse its id for `for_s` seconds; 0: to the run's end."""

    peer: str
    reason: str
    for_s: float


class Enrol(Message, frozen=True):
    """Certify this peer's own key (32 bytes). Who has a certificate gets another one for the same peer."""

    run: str
    peer: str
    public_key: bytes


class SettingsWanted(Message, frozen=True):
    """Tell the run's settings, for a newcomer that has none of its own."""

    run: str


class MakeToken(Message, frozen=True):
    """Make a token. `for_s` 0: it does not expire."""

    scope: str
    for_s: float
    note: str


class RevokeToken(Message, frozen=True):
    """Nobody can come by this token any more. Who came by it stays."""

    token: str


class TokensWanted(Message, frozen=True):
    """Tell which tokens there are."""


class VpnAnnounce(Message, frozen=True):
    """A peer's `atoll vpn`, every few seconds: I am here; who else? Only public keys travel.

    WireGuard listens on UDP `port`, and TCP connections to the same port measure; `ping_port` (UDP) answers inside the
    VPN, 0: not yet. `endpoints` ("address:port", best first) are where it may be reached as far as it knows; the first
    `stated` of them a person gave. On UDP `relay_port` (0: none) it passes others' packets on, if it is the hub, which
    it wants to be with `hub`. `seen` are the endpoints at which it hears others, by name. `leaving`: goodbye.
    """

    run: str
    peer: str
    public_key: bytes
    port: int
    ping_port: int = 0
    relay_port: int = 0
    endpoints: tuple[str, ...] = ()
    stated: int = 0
    hub: bool = False
    seen: dict[str, str] = msgspec.field(default_factory=dict)
    leaving: bool = False


# ---- replies -----------------------------------------------------------------------------------------------------


class Done(Message, frozen=True):
    """Coordinator: what was decided, in a sentence. Not `ok`: nothing was done, and the sentence says why."""

    ok: bool
    reason: str


class Enrolled(Message, frozen=True):
    """Coordinator: the certificate, in PEM, and in how many seconds to ask for the next one."""

    certificate: str
    renew_s: float


class RunSettings(Message, frozen=True):
    """Coordinator: the run's settings, as in `messages.Welcome`; None while no one has given any."""

    settings: dict[str, Any] | None


class TokenText(Message, frozen=True):
    """Coordinator: the token that was made. It is told once, and kept nowhere."""

    id: str
    text: str

    def __repr__(self) -> str:
        return f"TokenText({self.id})"


class TokenStatus(msgspec.Struct, frozen=True):
    """A token, without its secret. `left_s` None: it does not expire. `peers` came by it."""

    id: str
    scope: str
    note: str
    left_s: float | None
    revoked: bool
    peers: tuple[str, ...]


class Tokens(Message, frozen=True):
    tokens: tuple[TokenStatus, ...]


class PeerStatus(msgspec.Struct, frozen=True):
    """One peer as the coordinator sees it. `state` is one of the words below, `says` the same in a few words.

    expected      a restarted coordinator waits for it
    connected     it has not declared yet
    waiting       for the run to start
    away          its connection closed
    silent        its connection is open, but no heartbeat comes
    training      in its inner loop
    ready         frozen, its update encoded
    reducing      in the attempt under way
    voted         in the attempt under way
    applying      the verdict is out, it takes the outer step
    catching up   it fetches what it lacks

    `step` is the run's inner step that it reported; it has made `steps_in_round` of `round_steps`, as far as known.
    `tokens` are those of its newest committed update. `heard_s` is how long ago it was last heard, `slots`
    how many data slots it holds.
    """

    peer: str
    state: str
    says: str
    member: bool
    step: int
    steps_in_round: int
    round_steps: int
    tokens: int
    heard_s: float
    leaving: str = ""
    slots: int = 0


class SlotsStatus(msgspec.Struct, frozen=True):
    """Of the text's `count` data slots: those of `epoch` are leased now; `leased` are, `unread` are free and unread."""

    count: int
    epoch: int
    leased: int
    unread: int


class Remark(msgspec.Struct, frozen=True):
    """Something that was said `ago_s` seconds ago."""

    ago_s: float
    text: str


class EvictedStatus(msgspec.Struct, frozen=True):
    """An id that is refused, for another `left_s` seconds (None: until the run ends)."""

    peer: str
    reason: str
    left_s: float | None


class ReachStatus(msgspec.Struct, frozen=True):
    """Who can dial whom. `rows[i][j]` is of `peers[i]` dialling `peers[j]`: "+" it can, "-" it cannot, "?" not known,
    "." itself. `says` is a sentence for each pair without an edge, and for each peer that nobody reaches."""

    peers: tuple[str, ...]
    rows: tuple[str, ...]
    says: tuple[str, ...] = ()


class Status(Message, frozen=True):
    """Coordinator: how the run stands.

    `round` is the open one, `version` the newest committed. `waiting` says what is waited for, `why` explains it, one
    sentence each. `reasons` and `failures` are the newest decisions and failures, newest first. `tokens_per_s` is over
    the newest commits, all members together; None before two. `links` are the rates that engines saw, at most
    `status.MAX_LINKS` of them, slowest first; a link with "" for one end stands for all others together. `slots` None:
    no data is leased. `reach` None: nobody has been asked whom it can dial.
    """

    run: str
    package: str
    term: int
    version: int
    round: int
    attempts: int
    started: bool
    stopping: str
    age_s: float
    policy: str
    min_peers: int
    start_peers: int
    waiting: str
    why: tuple[str, ...]
    peers: tuple[PeerStatus, ...]
    evicted: tuple[EvictedStatus, ...]
    tokens_per_s: float | None
    round_s: float | None
    reasons: tuple[Remark, ...]
    failures: tuple[Remark, ...]
    links: tuple[LinkRate, ...]
    slots: SlotsStatus | None = None
    reach: ReachStatus | None = None


class StandingBy(Message, frozen=True):
    """Coordinator, to every request: it does not lead `run`. `leader` is the address of who does, as that one shows
    itself; "" while nobody leads, or while it is not known: `trouble` says why.
    """

    run: str
    package: str
    leader: str
    trouble: str = ""


class VpnEntry(msgspec.Struct, frozen=True):
    """One peer of the VPN, as VpnAnnounce; `endpoints` are all that are known, also those at which others see it."""

    peer: str
    public_key: bytes
    port: int
    ping_port: int
    relay_port: int
    endpoints: tuple[str, ...]


class VpnMesh(Message, frozen=True):
    """Coordinator: the run's VPN. `network` is its /64; each peer's address in it follows from its public key.

    `hub` is the peer that passes on what two others cannot send each other, "" if there is none. Until `settled` peers
    may be missing that a restarted coordinator has not heard of again. `links` are what the asker's engine was seen to
    carry to the others.
    """

    network: str
    entries: tuple[VpnEntry, ...]
    hub: str
    settled: bool
    links: tuple[LinkRate, ...] = ()


OperatorOrder = StopRun | LeavePeer | EvictPeer
"""What the coordinator machine decides about."""
Request = (
    StatusWanted
    | OperatorOrder
    | SettingsWanted
    | Enrol
    | MakeToken
    | RevokeToken
    | TokensWanted
    | VpnAnnounce
)
Reply = Status | Done | StandingBy | RunSettings | Enrolled | TokenText | Tokens | VpnMesh

_operator_decoder = msgspec.msgpack.Decoder(OperatorConnect | Request)
_reply_decoder = msgspec.msgpack.Decoder(Challenge | OperatorWelcome | Refused | Reply)


def decode_from_operator(data: bytes) -> OperatorConnect | Request:
    """Raises msgspec.ValidationError or msgspec.DecodeError for anything that is no operator's message."""
    return _operator_decoder.decode(data)


def decode_reply(data: bytes) -> Challenge | OperatorWelcome | Refused | Reply:
    """Raises msgspec.ValidationError or msgspec.DecodeError for anything else."""
    return _reply_decoder.decode(data)
