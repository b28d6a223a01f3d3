"""`atoll checkpoints`: what a person sees of a place, and what they can take out of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from atoll.cli.main import run
from atoll.config.load import load
from atoll.train.llama import Llama
from atoll.train.models import build_model
from atoll.train.pretrained import load_weights, read_llama_config
from support.places import rewrite_manifest, save, small_llama

SHARD = {"start": 0, "stop": 1, "size_bytes": 9, "anchor_at": 1, "velocity_at": 1}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """In a run's folder: three versions, the last two of other weights."""
    path = tmp_path / "run" / "checkpoints"
    for version, seed in ((3, 0), (6, 1), (9, 1)):
        save(path, small_llama(seed), version, peer="b" if version == 9 else "a")
    return path


def outcome(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run(["checkpoints", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_ls_shows_every_version_newest_first(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys, "ls", place.parent)
    assert code == 0
    lines = [line.split() for line in out.splitlines()[1:]]
    assert [(line[0], line[1]) for line in lines] == [("9", "90"), ("6", "60"), ("3", "30")]
    assert "latest" in lines[0]
    assert [line[-1] for line in lines] == ["b", "a", "a"]


def test_ls_names_damage_and_what_was_left_unfinished(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "shared/00000006/shard-00000.safetensors").write_bytes(b"half")
    (place / "shared/.00000012.ab12.partial").mkdir()
    code, out, _ = outcome(capsys, "ls", place, "--json")
    said = json.loads(out)
    assert code == 0
    assert [(row["version"], bool(row["problem"])) for row in said["versions"]] == [
        (9, False),
        (6, True),
        (3, False),
    ]
    assert "bytes" in said["versions"][1]["problem"]
    assert said["unfinished"] == ["shared/.00000012.ab12.partial"]


def test_a_folder_without_checkpoints_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(capsys, "ls", tmp_path)
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert "holds no checkpoints" in err


def test_verify_reads_the_latest_and_its_own_parts(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys, "verify", place, "--json")
    assert code == 0
    parts = json.loads(out)["parts"]
    assert [(part["version"], part["peer"], part["problem"]) for part in parts] == [(9, "", ""), (9, "b", "")]


@pytest.mark.parametrize(
    "file", ["shared/00000009/shard-00000.safetensors", "peers/b/00000009/own.safetensors"]
)
def test_one_flipped_byte_is_found(place: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray((place / file).read_bytes())
    data[-1] ^= 1
    (place / file).write_bytes(data)
    code, out, err = outcome(capsys, "verify", place)
    assert code == 3
    assert "1 of 2 parts" in err
    assert Path(file).name in out


def test_verify_takes_one_version_or_all(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys, "verify", f"{place}@3")[1].startswith("version 3: whole")
    code, out, _ = outcome(capsys, "verify", place, "--all")
    assert (code, len(out.splitlines())) == (0, 6)
    code, _, err = outcome(capsys, "verify", f"{place}@4")
    assert (code, "it has 9, 6, 3" in err) == (2, True)


def test_diff_tells_equal_from_different_to_the_bit(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys, "diff", f"{place}@6", place)
    assert (code, "the same anchor, to the bit" in out) == (0, True)
    code, out, _ = outcome(capsys, "diff", f"{place}@3", f"{place}@6", "--json")
    said = json.loads(out)
    a, b = (dict(small_llama(seed).named_parameters()) for seed in (0, 1))
    for row in said["parameters"]:
        apart = (a[row["name"]] - b[row["name"]]).double()
        assert row["norm"] == pytest.approx(apart.norm().item(), rel=1e-6)
        assert row["largest"] == pytest.approx(apart.abs().max().item(), rel=1e-6)
    assert said["total"]["differing"] == sum(int((a[name] != b[name]).sum()) for name in a)
    code, out, _ = outcome(capsys, "diff", f"{place}@3", f"{place}@6", "--vector", "velocity", "--top", "1")
    assert "largest" in out.splitlines()[0]


def test_two_models_are_not_compared(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "tied", small_llama(tied=True), 1)
    code, _, err = outcome(capsys, "diff", place, tmp_path / "tied")
    assert (code, "two models" in err) == (2, True)


@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_folder_gives_the_same_weights_back(
    tmp_path: Path, tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = small_llama(3, tied=tied)
    save(tmp_path / "place", model, 4)
    out = tmp_path / "hf"
    assert outcome(capsys, "export", tmp_path / "place", "--out", out)[0] == 0
    config = read_llama_config(out)
    assert config == model.config
    again = Llama(config)
    load_weights(again, out)
    for (name, ours), theirs in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    code, _, err = outcome(capsys, "export", tmp_path / "place", "--out", out)
    assert (code, "--force" in err) == (2, True)
    assert outcome(capsys, "export", tmp_path / "place", "--out", out, "--force")[0] == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["hf", "place"]


def test_the_bytes_tokenizer_is_opened_by_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip(
        "tokenizers", reason="tokenizers is not installed: pip install atoll-train[data]"
    )
    save(tmp_path / "place", small_llama(), 1)
    assert outcome(capsys, "export", tmp_path / "place", "--out", tmp_path / "hf")[0] == 0
    opened = tokenizers.Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    text = "Grüße, 世界!\n\tdef f():\0"
    assert opened.encode(text).ids == list(text.encode())
    assert opened.decode(list(text.encode()), skip_special_tokens=False) == text


def test_a_damaged_anchor_is_not_exported(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = place / "shared/00000009/shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[4096] ^= 1
    shard.write_bytes(data)
    code, _, err = outcome(capsys, "export", place, "--out", tmp_path / "hf")
    assert (code, "does not have the digest" in err) == (3, True)
    assert not (tmp_path / "hf").exists()


def test_import_prints_the_section_that_starts_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "place", small_llama(5, tied=True), 4)
    outcome(capsys, "export", tmp_path / "place", "--out", tmp_path / "hf")
    code, out, _ = outcome(capsys, "import", tmp_path / "hf")
    assert code == 0
    toml = tmp_path / "run.toml"
    toml.write_text(out)
    ours = small_llama(5, tied=True)
    theirs = build_model(load(toml, ["data.seq_len=32"]))
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mistral"}, "only 'llama'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "'llama3' is not supported"),
        ({"head_dim": 4}, "head_dim = 4"),
        ({"hidden_size": 32, "head_dim": None}, "has shape"),
        ({"num_hidden_layers": 1}, "are not the model's"),
        ({"num_hidden_layers": 3}, "are missing"),
        ({"vocab_size": None}, "does not describe a Llama"),
    ],
)
def test_what_is_no_llama_of_ours_is_refused_by_name(
    tmp_path: Path, change: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "place", small_llama(), 4)
    outcome(capsys, "export", tmp_path / "place", "--out", tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    code, out, err = outcome(capsys, "import", tmp_path / "hf")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_a_pickle_in_the_place_of_weights_is_not_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "place", small_llama(), 4)
    outcome(capsys, "export", tmp_path / "place", "--out", tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"\x80\x04cos\nsystem\n(S'touch /tmp/never'\ntR.")
    code, _, err = outcome(capsys, "import", tmp_path / "hf")
    assert (code, "only safetensors" in err) == (2, True)


@pytest.mark.parametrize(
    "changes",
    [
        {"shards": [{**SHARD, "file": "../../../../etc/passwd"}]},
        {"shards": [{**SHARD, "file": "/etc/passwd"}]},
        {"numel": 1 << 62},
        {"numel": -1},
        {"version": 1 << 62},
        {"piece": 1},
        {"anchor": ["0" * 32] * 100000},
        {"format": 2},
        {"shards": []},
        {"shards": "x" * 1000000},
    ],
    ids=lambda changes: str(changes)[:50],
)
def test_a_manifest_that_lies_is_refused_and_nothing_else_is_touched(
    place: Path, changes: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in place.parent.parent.rglob("*") if path.is_file()}
    rewrite_manifest(place / "shared/00000009", **changes)
    code, _, err = outcome(capsys, "verify", f"{place}@9")
    assert (code, err.count("\n")) == (3, 1)
    after = {path: path.read_bytes() for path in place.parent.parent.rglob("*") if path.is_file()}
    assert {path for path in after if after[path] != before.get(path)} == {
        place / "shared/00000009/manifest.json"
    }
    assert outcome(capsys, "verify", f"{place}@6")[0] == 0, "the one before it is still good"


def test_a_link_in_the_place_of_a_shard_is_not_followed(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = place / "shared/00000009/shard-00000.safetensors"
    elsewhere = tmp_path / "elsewhere"
    shard.rename(elsewhere)
    shard.symlink_to(elsewhere)
    code, out, _ = outcome(capsys, "verify", place)
    assert (code, "it is a link" in out) == (3, True)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_opens_what_is_exported_with_equal_logits(tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install transformers"
    )
    model = small_llama(7, tied=tied)
    save(tmp_path / "place", model, 1)
    assert run(["checkpoints", "export", str(tmp_path / "place"), "--out", str(tmp_path / "hf")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer("def main(): ä", return_tensors="pt").input_ids
    assert ids[0].tolist() == list("def main(): ä".encode())
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids), rtol=1e-5, atol=1e-6)
