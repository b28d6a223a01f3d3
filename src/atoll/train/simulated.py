"""A whole run of the built-in trainer in one process: the same model, data, inner step and round arithmetic.

Peers train one after the other in the order of their ids. Their rounds have the same digests as the same run over
processes (oracle E31, `tests/e2e`), so that outer settings can be tried without a network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.config.schema import RunConfig
from atoll.data.corpus import Documents
from atoll.data.reader import Reader
from atoll.data.slots import static_assignment
from atoll.diloco.round import Work
from atoll.diloco.simulation import SimulatedRun, simulate
from atoll.state.tensors import ModelTensors
from atoll.train.batches import Batches
from atoll.train.build import build_inner, build_model, cut_slots, evaluation, outer_schedule
from atoll.train.inner import InnerStep


@dataclass
class TrainedPeer:
    """A virtual peer of a simulated run."""

    tensors: ModelTensors
    inner: InnerStep
    batches: Batches

    def train(self, steps: int, run_step: int) -> Work:
        work = Work()
        for step in range(run_step, run_step + steps):
            batch = next(self.batches)
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
    peers = []
    for index in range(num_peers):
        model = build_model(config)
        reader = Reader(slots, static_assignment(slots, index, num_peers), config.data.seq_len)
        peers.append(
            TrainedPeer(
                tensors=ModelTensors(model.named_parameters(remove_duplicate=False)),
                inner=build_inner(model, config),
                batches=Batches(reader, config.inner.batch_size),
            )
        )
    evaluate, _ = evaluation(peers[0].inner.model, held_out, config)

    def after_round(run: SimulatedRun) -> None:
        if eval_every_rounds and run.state.round % eval_every_rounds == 0:
            evaluated(run.state.step, evaluate())

    run = simulate(
        peers,
        outer_schedule(config.outer, config.run.steps),
        codec=config.outer.codec,
        error_feedback=config.outer.error_feedback,
        weights=config.outer.weights,
        after_round=after_round,
    )
    return run, evaluate()
