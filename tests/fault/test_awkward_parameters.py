"""K13 over real processes: awkward parameters, three peers, one with its modules in another order; as simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from atoll.diloco.schedule import OuterSchedule
from atoll.diloco.simulation import simulate
from atoll.diloco.work import Work
from atoll.state.tensors import ModelTensors
from support.awkward import INNER_STEPS, ROUNDS, Awkward, inner_optimizer, train_step
from support.swarm import Swarm, nursery

pytestmark = [pytest.mark.fault, pytest.mark.timeout(150)]
SCRIPT = Path(__file__).parents[1] / "support" / "awkward_peer.py"


class VirtualAwkward:
    def __init__(self, index: int) -> None:
        self.index = index
        self.model = Awkward()
        self.optimizer = inner_optimizer(self.model)
        self.tensors = ModelTensors(self.model.named_parameters(remove_duplicate=False))

    def train(self, steps: int, run_step: int) -> Work:
        work = Work()
        for step in range(run_step, run_step + steps):
            train_step(self.model, self.optimizer, self.index, step)
            work.add(1, None)
        return work


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_three_peers_hold_the_simulated_bits(tmp_path: Path, codec: str) -> None:
    torch.set_num_threads(1)
    schedule = OuterSchedule.constant(INNER_STEPS, 0.7, 0.9, total_steps=ROUNDS * INNER_STEPS)
    expected = [
        row.digest for row in simulate([VirtualAwkward(i) for i in range(3)], schedule, codec=codec).rounds
    ]
    with Swarm(tmp_path, start_peers=3) as swarm:
        started = {}
        for index, name in enumerate("abc"):
            results = tmp_path / f"{name}.results"
            arguments = ["--address", swarm.address, "--peer", name, "--index", str(index), "--codec", codec]
            child = nursery().start(SCRIPT, [*arguments, "--results", str(results)], tmp_path / f"{name}.log")
            started[name] = (child, results)
        for child, _ in started.values():
            assert child.wait(timeout=90) == 0, swarm.logs()
    for name, (_, results) in started.items():
        rows = [json.loads(line) for line in results.read_text().splitlines()]
        assert [row["digest"] for row in rows] == expected, name
    untrained = ModelTensors(Awkward().named_parameters(remove_duplicate=False))
    index = [p.name for p in untrained.layout.parameters].index("unused.weight")
    assert untrained.layout.sizes[index] == 13  # it travels, and nothing moved it: covered by the digests
