"""A whole run of the built-in trainer in one process: the same model, data, inner step and round arithmetic.

Peers train one after the other in the order of their ids. Their rounds have the same digests as the same run over
processes (oracle E31, `tests/e2e`), so that outer settings can be tried without a network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from atoll.config.schema import RunConfig
from atoll.data.corpus import Documents
from atoll.diloco.schedule import OuterSchedule
from atoll.diloco.simulation import SimulatedRun, simulate
from atoll.diloco.work import Work
from atoll.state.tensors import ModelTensors
from atoll.train.batches import Batches
from atoll.train.build import batches_of, cut_slots, evaluation, outer_schedule
from atoll.train.inner import InnerStep
from atoll.train.leases_here import LeasesHere
from atoll.train.models import build_inner, build_model, lower_precision


@dataclass
class TrainedPeer:
    """A virtual peer of a simulated run."""

    tensors: ModelTensors
    inner: InnerStep
    batches: Batches

    def train(self, steps: int, run_step: int) -> Work:
        work = Work()
        for step in range(run_step, run_step + steps):
            if (batch := self.batches.take()) is None:
                break
            report = self.inner.step(batch.inputs, batch.targets, step)
            work.add(report.trained_tokens, report.loss)
        return work


def simulate_run(
    config: RunConfig,
    num_peers: int,
    corpus: Documents,
    *,
    evaluated: Callable[[int, float], None] = lambda step, val_loss: None,
    eval_every_rounds: int = 0,
) -> tuple[SimulatedRun, float]:
    """Train `num_peers` virtual peers to the run's last step; returns the run and its final validation loss.

    `evaluated` is told the anchor's validation loss (nats per token) at every `eval_every_rounds`-th round.
    """
    train_part, held_out = corpus.split(config.data.val_fraction)
    slots = cut_slots(train_part, config)
    schedule = outer_schedule(config.outer, config.run.steps)
    leases = LeasesHere(slots.count, config.run.seed)
    peers: dict[str, TrainedPeer] = {}
    for name in (f"{index:06}" for index in range(num_peers)):
        model = build_model(config)
        tensors = ModelTensors(model.named_parameters(remove_duplicate=False))
        inner = build_inner(model, config)
        lower_precision(model, tensors, inner, config)
        peers[name] = TrainedPeer(
            tensors=tensors,
            inner=inner,
            batches=batches_of(slots, config, name, leases.of(name)),
        )
    leases.begin(_wishes(peers, schedule, 0))
    for peer in peers.values():
        peer.batches.begin()
    first = next(iter(peers.values()))
    evaluate, _ = evaluation(first.inner.model, held_out, config)

    def after_round(run: SimulatedRun) -> None:
        reads = {name: peer.batches.reads() for name, peer in peers.items()}
        wishes = _wishes(peers, schedule, run.state.step)
        if run.rounds[-1].contributors:
            leases.conclude(reads, wishes)
            for peer in peers.values():
                peer.batches.begin()
        else:
            leases.go_on(reads, wishes)
            for peer in peers.values():
                peer.batches.go_on()
        if eval_every_rounds and run.state.round % eval_every_rounds == 0:
            evaluated(run.state.step, evaluate())

    run = simulate(
        list(peers.values()),
        schedule,
        codec=config.outer.codec,
        error_feedback=config.outer.error_feedback,
        weights=config.outer.weights,
        after_round=after_round,
    )
    return run, evaluate()


def _wishes(peers: Mapping[str, TrainedPeer], schedule: OuterSchedule, step: int) -> dict[str, int]:
    """How many slots each wishes to hold for the round that begins at the run's `step`."""
    steps = 0 if schedule.finished(step) else schedule.round_at(step).inner_steps
    return {name: peer.batches.wish(steps) for name, peer in peers.items()}
