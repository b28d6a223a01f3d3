"""K13 over real processes: awkward parameters, three peers, one with its modules in another order; as simulated.

So are peers of several ranks, whichever way each parameter is cut, and beside peers of one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.config.environment import for_rank
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


@pytest.mark.parametrize(
    ("codec", "ranks", "cuts"),
    [
        ("fp32", (1, 1, 1), ""),
        ("int8", (1, 1, 1), ""),
        ("fp32", (1, 2, 3), "fully_shard"),
        ("fp32", (3, 1, 2), "distribute_tensor"),
    ],
    ids=str,
)
def test_three_peers_hold_the_simulated_bits(
    tmp_path: Path, codec: str, ranks: tuple[int, ...], cuts: str
) -> None:
    torch.set_num_threads(1)
    schedule = OuterSchedule.constant(INNER_STEPS, 0.7, 0.9, total_steps=ROUNDS * INNER_STEPS)
    virtual = [VirtualAwkward(i) for i in range(3)]
    expected = [row.digest for row in simulate(virtual, schedule, codec=codec).rounds]
    swarm, found = run(tmp_path, codec, ranks, cuts.split() or [""])
    for peer, rows in found.items():
        assert [row["digest"] for row in rows] == expected, (peer, swarm.logs())
        for name, parameter in virtual[0].model.named_parameters():  # what is frozen and empty too
            assert rows[-1]["whole"][name] == parameter.double().flatten().tolist(), (peer, name)
        assert rows[-1]["count"] == 3, peer
    untrained = ModelTensors(Awkward().named_parameters(remove_duplicate=False))
    index = [p.name for p in untrained.layout.parameters].index("unused.weight")
    assert untrained.layout.sizes[index] == 13  # it travels, and nothing moved it: covered by the digests


def test_what_is_encoded_by_ranks_is_the_same_on_all_peers(tmp_path: Path) -> None:
    """Not as simulated: blocks of a codec begin anew at every rank's rows."""
    swarm, found = run(tmp_path, "int8", (2, 3, 1), ("fully_shard", "distribute_tensor"))
    for what in ("version", "digest"):
        a, b, c = ([row[what] for row in rows] for rows in found.values())
        assert a == b == c, swarm.logs()
        assert len(set(a)) == ROUNDS
    moved = found["a"][-1]["whole"]
    for name, parameter in Awkward().named_parameters():
        same = moved[name] == parameter.double().flatten().tolist()
        assert same == (name in ("frozen.weight", "frozen.bias", "unused.weight", "unused.bias", "empty")), (
            name
        )


def run(
    folder: Path, codec: str, ranks: Sequence[int], cuts: Sequence[str]
) -> tuple[Swarm, dict[str, list[dict[str, Any]]]]:
    """What peers a, b and c of so many ranks wrote after each round; all of their processes must exit 0."""
    with Swarm(folder, start_peers=3) as swarm:
        children = []
        for index, (name, count) in enumerate(zip("abc", ranks, strict=True)):
            arguments = ["--address", swarm.address, "--peer", name, "--index", str(index), "--codec", codec]
            arguments += ["--results", str(folder / f"{name}.results"), "--cut", cuts[index % len(cuts)]]
            for rank in range(count):
                told = for_rank(rank, count, folder / f"{name}.ranks", {}) if count > 1 else {}
                children.append(nursery().start(SCRIPT, arguments, folder / f"{name}.log", told))
        for child in children:
            assert child.wait(timeout=90) == 0, swarm.logs()
    results = {name: (folder / f"{name}.results").read_text().splitlines() for name in "abc"}
    return swarm, {name: [json.loads(line) for line in lines] for name, lines in results.items()}
