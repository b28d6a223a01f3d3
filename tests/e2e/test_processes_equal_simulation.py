"""Oracle E31: peers as processes give the same digests, round by round, as the single-process simulation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from atoll.config.load import load
from atoll.dashboard.tail import EventTail
from atoll.events import AnchorEvaluated, RoundApplied
from support.swarm import environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

RUN = """
[run]
name = "e31"
seed = 3
steps = 23

[model]
dim = 32
num_layers = 2
num_heads = 4
num_kv_heads = 2
ffn_dim = 64
max_seq_len = 32

[data]
sources = ["{text}"]
seq_len = 32
slots = 16
val_fraction = 0.2

[inner]
batch_size = 4
warmup_steps = 4

[outer]
inner_steps = [{{ until = 6, inner_steps = 3 }}, {{ inner_steps = 7 }}]
codec = "{codec}"

[membership]
start_peers = {peers}

[local]
out = "{out}"
threads = 1
"""


@pytest.mark.parametrize(("peers", "codec"), [(2, "fp32"), (3, "int8"), (2, "stat2"), (3, "topk")])
def test_digests_are_equal(tmp_path: Path, peers: int, codec: str) -> None:
    import torch

    text = tmp_path / "text"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text(
            "\n".join(f"line {i} of document {number}: {i * number}" for i in range(60))
        )
    run_toml = tmp_path / "run.toml"
    run_toml.write_text(RUN.format(text=text, codec=codec, peers=peers, out=tmp_path / "runs"))
    command = [sys.executable, "-m", "atoll", "launch", str(run_toml), "--peers", str(peers)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr

    torch.set_num_threads(1)
    from atoll.train.build import load_corpus
    from atoll.train.simulated import simulate_run

    config = load(run_toml, [])
    run, val_loss = simulate_run(config, peers, load_corpus(config))
    expected = [row.digest for row in run.rounds]
    assert len(expected) == 2 + 3  # 3+3, then 7+7+3 steps

    digests: dict[str, list[str]] = {}
    evaluated: list[float] = []
    (folder,) = (tmp_path / "runs").iterdir()
    for seen in EventTail(folder).read():
        if isinstance(seen.event, RoundApplied):
            digests.setdefault(seen.source, []).append(seen.event.digest)
        elif isinstance(seen.event, AnchorEvaluated):
            evaluated.append(seen.event.val_loss)
    assert len(digests) == peers
    for peer, found in digests.items():
        assert found == expected, peer
    assert evaluated[-1] == val_loss
