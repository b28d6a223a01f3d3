"""The small values that every floor speaks of: names of operations, nodes, lanes, plans.

All are immutable msgspec structs, so that the same value goes over the wire, into the journal and into a test.
A *plan* holds integers and names only; `atoll.plan` expands it, by the same pure functions on every member.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class OpId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The name of one attempt to reduce one fragment. Given by the coordinator, never counted locally."""

    term: int
    round: int
    fragment: int = 0
    attempt: int = 0

    def __str__(self) -> str:
        return f"t{self.term}/r{self.round}/f{self.fragment}/a{self.attempt}"


class NodeId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One rank of one peer: the thing that plans, hellos and transfers address."""

    peer: str
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.peer}.{self.rank}"


class Range(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Elements `[start, stop)` of the model's one long vector (global coordinates)."""

    start: int
    stop: int


class RankInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a peer announces for one of its ranks: where its engine listens, which elements it owns, what it may carry.

    `max_up` and `max_down` are the caps that its engine keeps to, in bytes per second; 0: none. `sidecar_port` is where
    its snapshots and updates can be fetched, on the same host; 0: nowhere. `more_hosts` are further hosts at which the
    engine may be found, each with the same port or with one of its own ("192.0.2.1:7001", "[2001:db8::1]:7001").
    """

    host: str
    port: int
    ranges: tuple[Range, ...]
    max_up: int = 0
    max_down: int = 0
    sidecar_port: int = 0
    more_hosts: tuple[str, ...] = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        return (self.host, *self.more_hosts)

    def bare_hosts(self) -> tuple[str, ...]:
        """All hosts, without ports of their own."""
        return tuple(dict.fromkeys(map(host_of, self.hosts)))


def host_of(text: str) -> str:
    """A host as people write it, less a port of its own: of "host:7001", "2001:db8::1", "[2001:db8::1]:7001"."""
    if text.startswith("["):
        return text[1:].partition("]")[0]
    host, colon, port = text.rpartition(":")
    return host if colon and ":" not in host and port.isdecimal() else text


def shown(hosts: Sequence[str], port: int) -> str:
    """Hosts, each with `port` or with one of its own, as people write addresses: "host:7000, [2001:db8::1]:7001"."""
    return ", ".join(dict.fromkeys(_address(host, port) for host in hosts))


def _address(text: str, port: int) -> str:
    host = host_of(text)
    if text not in (host, f"[{host}]"):
        return text
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Source(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A donor's sidecar: where one peer's snapshots and updates are fetched."""

    peer: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.peer} at {shown((self.host,), self.port)}"


class ParameterInfo(msgspec.Struct, frozen=True):
    """One parameter of the run's layout: `shape` in elements, `dtype` as torch spells it (`float32`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Edge(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A directed link between two peers, by peer id."""

    source: str
    target: str


class Lane(msgspec.Struct, frozen=True):
    """One reduction tree and the share of the data it carries: up to the root, and down again.

    `root` is the peer that finishes the sum. `up[i]` is the member to which member `i` sends what it has (its own
    update, or the mean of those below it), `down[i]` the one from which it gets the finished bytes; both are indices
    into the plan's members, the root's are its own. Empty: everybody sends to the root and hears from it (a star).
    Shares are integers; a lane carries `share / sum(shares)` of every route.
    """

    root: str
    share: int = 1
    up: tuple[int, ...] = ()
    down: tuple[int, ...] = ()


class Contribution(msgspec.Struct, frozen=True):
    """Whose update is in the sum, and with which integer weight (divided by the common divisor of all).

    `digest` is that of its encoded bytes, from its `ready`: bytes that a node kept from an earlier attempt of the
    round are used again only under the same digest. Empty: never.
    """

    peer: str
    weight: int
    digest: str = ""


class Plan(msgspec.Struct, frozen=True):
    """One attempt at a round, decided by the coordinator.

    `members` (sorted by id) all receive the result; `contributions` (sorted by id) are summed, in that order.
    `base_version` is the version every member stands on. `deadline_s` bounds the attempt on every member. A chunk has
    at most `chunk_bytes` on the wire (or one block); `connections` are opened, and kept, between two members that
    exchange data. `alike` is for the wire alone (`membership.compact`).
    """

    op: OpId
    base_version: int
    members: tuple[str, ...]
    contributions: tuple[Contribution, ...]
    ranks: dict[str, tuple[RankInfo, ...]]
    lanes: tuple[Lane, ...]
    codec: str
    deadline_s: float
    chunk_bytes: int = 1 << 20
    connections: int = 1
    alike: dict[str, str] = {}


class LinkRate(msgspec.Struct, frozen=True):
    """What one directed link was seen to carry: bytes per second while it had something to carry, and its round trip.

    `target` "" stands for all others together: the sender's uplink; `source` "" likewise: the receiver's downlink.
    `rtt_s` 0: not known. `loss`: the share of segments that the way lost while no queue was seen, as the sender's
    system counts what it sends again; 0: none, or not known.
    """

    source: str
    target: str
    bytes_per_s: float
    rtt_s: float = 0.0
    loss: float = 0.0


class PlanRequest(msgspec.Struct, frozen=True):
    """What lanes are to be found for.

    `members` from oldest to youngest; `contributors` are those with an update. `wire_bytes` is the size of one encoded
    vector. `broken` links carry nothing; `links` are the rates as last seen, `max_up` and `max_down` the members' own
    limits (bytes per second). `previous` is the plan of the round's last attempt: what its lanes brought is kept where
    it can be. `topology` "auto" is the planner's choice, `connections` 0 likewise.
    """

    members: tuple[str, ...]
    contributors: tuple[str, ...]
    wire_bytes: int
    codec: str
    broken: frozenset[Edge] = frozenset()
    links: tuple[LinkRate, ...] = ()
    max_up: dict[str, int] = {}
    max_down: dict[str, int] = {}
    previous: Plan | None = None
    topology: str = "auto"
    connections: int = 0


class PlanChoice(msgspec.Struct, frozen=True):
    """The lanes for a request, and why these. `dropped` are members that no lane can serve; `lanes` are the others'."""

    dropped: frozenset[str]
    lanes: tuple[Lane, ...]
    topology: str = "direct"
    predicted_s: float = 0.0
    reason: str = ""
    connections: int = 1
    chunk_bytes: int = 1 << 20


class TransferStats(msgspec.Struct, frozen=True):
    """What one attempt cost this rank. Bytes are counted at the socket, headers and handshakes included.

    `links` are the rates that this rank saw, in both directions.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    wire_s: float = 0.0
    encode_s: float = 0.0
    links: tuple[LinkRate, ...] = ()


class ReduceReport(msgspec.Struct, frozen=True):
    """How one attempt ended on this rank.

    If `ok`, the finished bytes lie in the caller's result buffer. Otherwise its contents are unspecified,
    `broken` names the links that failed, and `reason` says it in a sentence.
    """

    ok: bool
    reason: str
    broken: tuple[Edge, ...] = ()
    stats: TransferStats = TransferStats()


class CodecSpec(msgspec.Struct, frozen=True):
    """How a codec spends bytes, and whether it wants error feedback.

    A block has `block` elements, or fewer at the end of a segment. At most `kept` of them are written, `bits` each
    (rounded up to bytes), after `header_bytes`. `feedback` is the share of the residual that is sent again where a
    run does not say otherwise; 0: none.
    """

    name: str
    block: int
    kept: int
    header_bytes: int
    bits: int
    feedback: float = 0.0

    def block_bytes(self, numel: int) -> int:
        """Wire bytes of one block of `numel <= block` elements."""
        return self.header_bytes + (min(numel, self.kept) * self.bits + 7) // 8

    def run_bytes(self, numel: int) -> int:
        """Wire bytes of a run of `numel` elements that begins at a block boundary."""
        full, tail = divmod(numel, self.block)
        return full * self.block_bytes(self.block) + (self.block_bytes(tail) if tail else 0)


CODECS: dict[str, CodecSpec] = {
    spec.name: spec
    for spec in (
        CodecSpec(name="fp32", block=256, kept=256, header_bytes=0, bits=32),
        CodecSpec(name="bf16", block=256, kept=256, header_bytes=0, bits=16),
        CodecSpec(name="fp16", block=256, kept=256, header_bytes=0, bits=16),
        CodecSpec(name="int8", block=256, kept=256, header_bytes=4, bits=8),
        CodecSpec(name="int4", block=256, kept=256, header_bytes=4, bits=4),
        CodecSpec(name="e3m0", block=256, kept=256, header_bytes=4, bits=4),
        CodecSpec(name="stat2", block=4096, kept=4096, header_bytes=16, bits=2, feedback=0.95),
        CodecSpec(name="topk", block=4096, kept=64, header_bytes=16, bits=14, feedback=0.95),
        CodecSpec(name="topk256", block=4096, kept=256, header_bytes=16, bits=14, feedback=0.95),
    )
}
