"""How a declaration differs from the run: the first difference in a sentence, with both sides' values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atoll.membership.messages import Scalar
from atoll.values import ParameterInfo, RankInfo

Layout = Mapping[str, ParameterInfo]


def settings_difference(run: Mapping[str, Scalar], peer: Mapping[str, Scalar], who: str) -> str | None:
    """The first key, in order of the alphabet, that differs, with both values; None if all agree."""
    if run == peer:
        return None
    for key in sorted(run.keys() | peer.keys()):
        if key not in peer:
            return f"{who} has no setting {key}, the run has {key} = {run[key]!r}"
        if key not in run:
            return f"{who} has {key} = {peer[key]!r}, the run has no such setting"
        if run[key] != peer[key]:
            return f"{who} has {key} = {peer[key]!r}, the run has {run[key]!r}"
    return None


def layout_difference(run: Layout, peer: Layout, who: str) -> str | None:
    """The first parameter that differs, matched by name: missing, of other shape or dtype, or extra."""
    if run == peer:
        return None
    for name, wanted in run.items():
        found = peer.get(name)
        if found is None:
            return f"{who} lacks parameter {name}, which the run has as {_spelled(wanted)}"
        if found != wanted:
            return f"{who} has parameter {name} as {_spelled(found)}, the run as {_spelled(wanted)}"
    for name, extra in peer.items():
        if name not in run:
            return f"{who} has parameter {name} as {_spelled(extra)}, which the run has not"
    return None


def _spelled(parameter: ParameterInfo) -> str:
    return f"{parameter.dtype}{list(parameter.shape)}"


def ownership_fault(ranks: Sequence[RankInfo], numel: int, who: str) -> str | None:
    """What is wrong with the ranges that a peer's ranks own: each of `numel` elements has one owner; None if so."""
    pieces = sorted((each.start, each.stop, rank) for rank, info in enumerate(ranks) for each in info.ranges)
    done = 0
    for start, stop, rank in pieces:
        if start >= stop or start < 0 or stop > numel:
            return f"{who} rank {rank} owns elements {start} to {stop}; the model has 0 to {numel}"
        if start != done:
            whose = "nobody owns" if start > done else "two ranks own"
            return f"of {who} {whose} elements {min(start, done)} to {max(start, done)}"
        done = stop
    return f"of {who} nobody owns elements {done} to {numel}" if done != numel else None
