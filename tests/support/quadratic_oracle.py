"""What a run of quadratic peers must have computed, from its decisions alone: one formula, in float64.

A peer with center c that makes k inner steps from theta ends at c + (theta - c) 0.9^k, so its pseudo-gradient is
(theta - c)(1 - 0.9^k). The outer step is Nesterov's. With centers that are distinct powers of two, a wrong contributor,
a wrong weight or a stale update gives another value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

KEPT_PER_STEP = 0.9  # inner SGD with lr 0.1 on (theta - c)^2 / 2


@dataclass(frozen=True)
class Commit:
    """One decision: the version it made, and each contributor's weight."""

    version: int
    weights: Mapping[str, int]


@dataclass(frozen=True)
class Seen:
    """A value of a version, and who says so."""

    version: int
    peer: str
    theta: float


class Quadratic:
    """The shared state of such a run."""

    def __init__(self, centers: Mapping[str, float], lr: float = 0.7, momentum: float = 0.9) -> None:
        self.theta, self.velocity = 0.0, 0.0
        self._centers, self._lr, self._momentum = centers, lr, momentum

    def commit(self, weights: Mapping[str, int], steps: Mapping[str, int]) -> None:
        mean = sum(
            weight * (self.theta - self._centers[peer]) * (1 - KEPT_PER_STEP ** steps[peer])
            for peer, weight in weights.items()
        ) / sum(weights.values())
        self.velocity = self._momentum * self.velocity + mean
        self.theta -= self._lr * (mean + self._momentum * self.velocity)


def wrong_values(
    commits: Sequence[Commit],
    centers: Mapping[str, float],
    steps: Mapping[tuple[int, str], int],
    seen: Iterable[Seen],
    tolerance: float = 1e-4,
) -> list[str]:
    """A sentence for every version whose value, or whose weights, the decisions do not explain.

    `steps` are inner steps by (version made, peer), as the peers tell; of a contributor that died before it could
    tell, the weight says them: every inner step is one token.
    """
    wrong = []
    by_version: dict[int, list[Seen]] = {}
    for each in seen:
        by_version.setdefault(each.version, []).append(each)
    state = Quadratic(centers)
    for number, commit in enumerate(commits, 1):
        if commit.version != number:
            return [*wrong, f"version {number} was never decided; the next one is {commit.version}"]
        told = {peer: steps[number, peer] for peer in commit.weights if (number, peer) in steps}
        if not _agree(commit.weights, told):
            wrong.append(f"version {number}: weights {dict(commit.weights)} for inner steps {told}")
        state.commit(commit.weights, _all_steps(commit.weights, told))
        for each in by_version.get(number, []):
            if abs(each.theta - state.theta) > tolerance * max(1.0, abs(state.theta)):
                wrong.append(
                    f"version {number}: {each.peer} has {each.theta!r} where {dict(commit.weights)} "
                    f"with steps {told} give {state.theta!r}"
                )
    beyond = max(by_version, default=0)
    if beyond > len(commits):
        wrong.append(f"version {beyond} was applied, but {len(commits)} is the last that was decided")
    return wrong


def _agree(weights: Mapping[str, int], told: Mapping[str, int]) -> bool:
    """Weights are tokens over their common divisor, so all have one ratio to the steps."""
    return len({told[peer] / weights[peer] for peer in told}) <= 1


def _all_steps(weights: Mapping[str, int], told: Mapping[str, int]) -> dict[str, int]:
    """The steps of all: those told, and for the others the weight, in the unit of those told (else one token)."""
    unit = max((told[peer] // weights[peer] for peer in told), default=1)
    return {peer: told.get(peer, weight * unit) for peer, weight in weights.items()}
