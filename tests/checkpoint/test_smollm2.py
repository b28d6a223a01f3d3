"""A model that others trained, from its package to a run's start weights and back: SmolLM2-135M (93 MB, fetched)."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.cli.main import run
from atoll.config.load import load
from atoll.train.models import build_model
from support.places import save
from support.smollm2 import fetch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TOKENS = 512


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("smollm2")
    yield fetch(folder)
    shutil.rmtree(folder)  # half a gigabyte, which kept test folders would hold three times


def test_smollm2_is_imported_computes_as_it_did_and_is_exported_to_the_bit(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    assert run(["checkpoints", "import", str(hf)]) == 0
    said = capsys.readouterr().out
    toml = tmp_path / "run.toml"
    toml.write_text(said)
    assert f'init_from = "{hf.resolve().as_posix()}"' in said
    ours = build_model(load(toml))
    assert ours.config.num_parameters() == 134_515_008

    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    text = inspect.getsource(textwrap)
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :TOKENS]
    with torch.no_grad():
        logits, wanted = ours(ids), theirs(ids).logits
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-3)
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    assert loss < 3, "weights in a wrong order would agree with each other too, but would know no Python"

    save(tmp_path / "place", ours, 1)
    out = tmp_path / "exported"
    command = ["checkpoints", "export", str(tmp_path / "place"), "--out", str(out)]
    assert run([*command, "--tokenizer", str(hf / "tokenizer.json")]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (hf, out))
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert torch.equal(values, after[name]), name
    del before, after
    again = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, wanted)
    assert transformers.AutoTokenizer.from_pretrained(out)(text).input_ids[:TOKENS] == ids[0].tolist()
    print(f"largest difference of logits {(logits - wanted).abs().max():.2e}, loss {loss:.3f}")
    for large in (tmp_path / "place", out):
        shutil.rmtree(large)
