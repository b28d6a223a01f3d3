"""What the ranks of a peer tell each other of a round, and what it makes of the peer; with one rank, of that rank."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from atoll.plan.links import carried_at_once
from atoll.values import ReduceReport, TransferStats


class FrozenRank(msgspec.Struct, frozen=True):
    """A rank's share of the update that its peer is ready with."""

    squared_norm: float
    finite: bool
    digest: bytes


class ReducedRank(msgspec.Struct, frozen=True):
    """What a rank's engine brought; `digests` of the routes of this rank."""

    report: ReduceReport
    digests: dict[int, bytes] = {}


def report_of_peer(reports: Sequence[ReduceReport]) -> ReduceReport:
    """What a peer of several ranks says of an attempt."""
    if len(reports) == 1:
        return reports[0]
    bad = [(rank, each) for rank, each in enumerate(reports) if not each.ok]
    # Who failed comes before those that gave up because of it.
    bad.sort(key=lambda each: (not each[1].broken, each[1].reason == "aborted"))
    failed = [f"rank {rank}: {each.reason}" for rank, each in bad]
    return ReduceReport(
        ok=not failed,
        reason=failed[0] if failed else reports[0].reason,
        broken=tuple(sorted({edge for each in reports for edge in each.broken})),
        stats=TransferStats(
            sent_bytes=sum(each.stats.sent_bytes for each in reports),
            received_bytes=sum(each.stats.received_bytes for each in reports),
            wire_s=max(each.stats.wire_s for each in reports),
            encode_s=max(each.stats.encode_s for each in reports),
            links=carried_at_once(link for each in reports for link in each.stats.links),
        ),
    )


def added(a: TransferStats, b: TransferStats) -> TransferStats:
    return TransferStats(
        sent_bytes=a.sent_bytes + b.sent_bytes,
        received_bytes=a.received_bytes + b.received_bytes,
        wire_s=a.wire_s + b.wire_s,
        encode_s=a.encode_s + b.encode_s,
    )
