"""DiLoCo in one process: peers one after the other, the same codec, sum and outer step as over the network.

This is what processes must equal to the bit (oracle E31), and what a laptop uses to try outer settings: no sockets,
no coordinator, only the arithmetic of a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from atoll import kernels
from atoll.diloco.outer import OuterState
from atoll.diloco.schedule import OuterSchedule
from atoll.diloco.work import Work
from atoll.kernels import Bytes, Floats
from atoll.plan.grid import Grid
from atoll.state.feedback import ErrorFeedback, Share, chosen_beta
from atoll.state.tensors import ModelTensors


class VirtualPeer(Protocol):
    """One peer of a simulated run: its weights, and how it takes inner steps."""

    @property
    def tensors(self) -> ModelTensors: ...

    def train(self, steps: int, run_step: int) -> Work:
        """Take `steps` inner steps, the first of them at the run's `run_step`; return what was done."""
        ...


@dataclass(frozen=True)
class SimulatedRound:
    """What a round did: who contributed (by index), with which weights, and the digest of the state after it."""

    round: int
    step: int
    contributors: tuple[int, ...]
    weights: tuple[int, ...]
    digest: str
    mean_loss: float


@dataclass
class SimulatedRun:
    state: OuterState
    rounds: list[SimulatedRound] = field(default_factory=list)


def simulate(
    peers: Sequence[VirtualPeer],
    schedule: OuterSchedule,
    *,
    codec: str = "int8",
    error_feedback: Share = "auto",
    weights: str = "tokens",
    num_rounds: int | None = None,
    absent: Callable[[int], Sequence[int]] = lambda round_: (),
    after_round: Callable[[SimulatedRun], None] = lambda run: None,
) -> SimulatedRun:
    """Run rounds until the schedule's last step, or `num_rounds`. Peers are in the order of their ids.

    All peers must start from equal weights. `absent(round)` names peers (by index) that take no part in a round and
    are gone for its duration; their local work is discarded, as for a peer that is left out. `error_feedback` is the
    share of what the codec dropped that is sent again; "auto": the codec's own.
    """
    state = OuterState(peers[0].tensors.read())
    run = SimulatedRun(state)
    grid = Grid.of(peers[0].tensors.layout.sizes)
    beta = chosen_beta(codec, error_feedback)
    senders = [_Sender(peer.tensors, grid, codec, beta) for peer in peers]
    while not schedule.finished(state.step) and (num_rounds is None or len(run.rounds) < num_rounds):
        shape = schedule.round_at(state.step)
        works = [peer.train(shape.inner_steps, state.step) for peer in peers]
        gone = set(absent(state.round))
        counted = [i for i, work in enumerate(works) if i not in gone and work.steps and work.tokens]
        raw = [works[i].tokens if weights == "tokens" else 1 for i in counted]
        divisor = math.gcd(*raw) if raw else 1
        shares = [value // divisor for value in raw]
        if counted:
            contributors = [senders[i] for i in counted]
            state.commit(_mean(state, contributors, shares, grid, codec), shape)
            for sender in contributors:
                sender.commit()
            for peer in peers:
                peer.tensors.write(state.anchor)
        else:
            state.skip(shape)
        losses = [works[i].mean_loss for i in counted]
        run.rounds.append(
            SimulatedRound(
                round=state.round - 1,
                step=state.step,
                contributors=tuple(counted),
                weights=tuple(shares),
                digest=state.digest(),
                mean_loss=float(np.mean(losses)) if losses else math.nan,
            )
        )
        after_round(run)
    return run


class _Sender:
    """What a peer holds to contribute: its update, the encoded bytes, and what is owed from earlier rounds."""

    def __init__(self, tensors: ModelTensors, grid: Grid, codec: str, beta: float) -> None:
        self._tensors = tensors
        self._feedback = ErrorFeedback(codec, grid.boundaries, beta)
        self._delta = np.empty(grid.numel, dtype=np.float32)
        self._data = np.empty(grid.wire_bytes(codec), dtype=np.uint8)

    def encode(self, anchor: Floats) -> Bytes:
        self._tensors.subtract_from(anchor, self._delta)
        if not self._feedback.encode(self._delta, self._data):
            raise ValueError("a peer's update is not finite")
        return self._data

    def commit(self) -> None:
        self._feedback.commit(self._delta, self._data)


def _mean(
    state: OuterState, senders: Sequence[_Sender], weights: Sequence[int], grid: Grid, codec: str
) -> Floats:
    """The finished mean of the peers' pseudo-gradients, by the engine's own formula."""
    contributions = [sender.encode(state.anchor) for sender in senders]
    finished = np.empty(grid.wire_bytes(codec), dtype=np.uint8)
    if not kernels.weighted_mean(codec, grid.boundaries, contributions, list(weights), finished):
        raise ValueError("the mean of the updates is not finite")
    mean = np.empty(grid.numel, dtype=np.float32)
    kernels.decode(codec, grid.boundaries, finished, mean)
    return mean
