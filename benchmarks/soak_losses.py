"""What faults cost a soak, in rounds behind its own pace."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from soak_faults import Fault


def progress(commits_s: Sequence[float], at_s: float) -> float:
    """Rounds committed by then; between two commits it grows evenly, so that no window gains or loses by its cut."""
    for number, (before, after) in enumerate(itertools.pairwise(commits_s), 1):
        if at_s < after:
            return number + max(0.0, at_s - before) / (after - before)
    return float(len(commits_s))


def pace_in(commits_s: Sequence[float], begin: float, end: float) -> float:
    """Rounds a second."""
    return (progress(commits_s, end) - progress(commits_s, begin)) / (end - begin)


def lost_after(
    faults: Sequence[Fault], commits_s: Sequence[float], pace: float, end: float
) -> list[tuple[Fault, float]]:
    """Rounds behind the pace from each fault to the next one."""
    lost = []
    for fault, until in zip(faults, [*(each.at_wall_s for each in faults[1:]), end], strict=True):
        made = progress(commits_s, until) - progress(commits_s, fault.at_wall_s)
        lost.append((fault, pace * (until - fault.at_wall_s) - made))
    return lost


def by_kind(
    lost: Sequence[tuple[Fault, float]], of_all: Callable[[Sequence[float]], float]
) -> dict[str, float]:
    """One number for all faults of a kind."""
    kinds = dict.fromkeys(fault.kind for fault, _ in lost)
    return {
        kind: round(of_all([rounds for fault, rounds in lost if fault.kind == kind]), 2) for kind in kinds
    }


def noticed_after(
    fault: Fault, faults: Sequence[Fault], heartbeat_s: float, dead_s: float, listening_s: Sequence[float]
) -> float:
    """Seconds in which nobody can know of a fault: a dropped connection has one heartbeat, a silence the dead timeout.
    Who comes or says goodbye is noticed at once. While no coordinator listens nothing is noticed or decided.
    """
    own_s = {"kill": heartbeat_s, "stop": dead_s}.get(fault.kind, 0.0)
    gone_s = [
        each.at_wall_s for each in faults if each.kind == "coordinator" and each.at_wall_s <= fault.at_wall_s
    ]
    if not gone_s:
        return own_s
    again_s = next((at_s for at_s in listening_s if at_s > gone_s[-1]), fault.at_wall_s)
    return max(own_s, again_s - fault.at_wall_s)
