"""The small values that every floor speaks of: names of operations, nodes, lanes, plans.

All are immutable msgspec structs, so that the same value goes over the wire, into the journal and into a test.
A *plan* holds integers and names only; `atoll.plan` expands it, by the same pure functions on every member.
"""

from __future__ import annotations

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


class RankInfo(msgspec.Struct, frozen=True):
    """What a peer announces for one of its ranks: where its engine listens and which elements it owns."""

    host: str
    port: int
    ranges: tuple[Range, ...]


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
    """One reduction tree and the share of the data it carries.

    `root` is the peer that sums and finishes; every other member sends to it and receives from it (a star).
    Shares are integers; a lane carries `share / sum(shares)` of every route.
    """

    root: str
    share: int = 1


class Contribution(msgspec.Struct, frozen=True):
    """Whose update is in the sum, and with which integer weight (divided by the common divisor of all)."""

    peer: str
    weight: int


class Plan(msgspec.Struct, frozen=True):
    """One attempt at a round, decided by the coordinator.

    `members` (sorted by id) all receive the result; `contributions` (sorted by id) are summed, in that order.
    `base_version` is the version every member stands on. `deadline_s` bounds the attempt on every member.
    """

    op: OpId
    base_version: int
    members: tuple[str, ...]
    contributions: tuple[Contribution, ...]
    ranks: dict[str, tuple[RankInfo, ...]]
    lanes: tuple[Lane, ...]
    codec: str
    deadline_s: float


class TransferStats(msgspec.Struct, frozen=True):
    """What one attempt cost this rank. Bytes are counted at the socket, headers and handshakes included."""

    sent_bytes: int = 0
    received_bytes: int = 0
    wire_s: float = 0.0
    encode_s: float = 0.0


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
    """How a codec spends bytes: blocks of `block` elements, each `header_bytes` and `bits` per element (rounded up)."""

    name: str
    block: int
    header_bytes: int
    bits: int

    def block_bytes(self, numel: int) -> int:
        """Wire bytes of one block of `numel <= block` elements."""
        return self.header_bytes + (numel * self.bits + 7) // 8

    def run_bytes(self, numel: int) -> int:
        """Wire bytes of a run of `numel` elements that begins at a block boundary."""
        full, tail = divmod(numel, self.block)
        return full * self.block_bytes(self.block) + (self.block_bytes(tail) if tail else 0)


CODECS: dict[str, CodecSpec] = {
    "fp32": CodecSpec(name="fp32", block=256, header_bytes=0, bits=32),
    "int8": CodecSpec(name="int8", block=256, header_bytes=4, bits=8),
}
