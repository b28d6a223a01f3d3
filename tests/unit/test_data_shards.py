"""Prepared text: the same batches as from memory, nothing of the corpus copied, and damage named."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tracemalloc
from collections import Counter
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cli.main import run
from atoll.config.load import load
from atoll.data import shard_format
from atoll.data.corpus import tokenize
from atoll.data.mixing import mix
from atoll.data.opening import open_prepared, open_shards
from atoll.data.preparing import identity_of, prepare
from atoll.data.reader import Reader, held_out_sequences
from atoll.data.shards import ShardCorpus, Shards
from atoll.data.slots import Slots
from atoll.data.tokenizer import ByteTokenizer
from atoll.errors import ConfigError, DataError
from atoll.train.build import cut_slots, load_corpus

BYTES = ByteTokenizer()
FIXTURE = Path(__file__).parent.parent / "support" / "shards" / "format-1"
TEXTS = ["one", "", "zwei ä", "3" * 300, "four\n", "x", *(f"text {i} " * i for i in range(1, 40))]


def holding_all(slots: Slots, seq_len: int) -> Reader:
    reader = Reader(slots, seq_len)
    reader.hold((slot, 0, 0) for slot in range(slots.count))
    return reader


def prepared(out: Path, texts: list[str] = TEXTS, shard_tokens: int = 500) -> Shards:
    prepare(texts, BYTES, identity_of("bytes", BYTES), out, shard_tokens=shard_tokens)
    return open_shards(str(out), out / "no-cache")


def test_shards_of_format_1_load_for_ever() -> None:
    shards = open_shards(str(FIXTURE), FIXTURE)
    shards.verify()
    assert shards.manifest.num_documents == 3
    corpus = shards.corpus()
    assert bytes(corpus.tokens[:].astype(np.uint8)) == b"\0first\0second \xc3\xa4\0the third\0"
    assert corpus.digest() == tokenize(["first", "second ä", "the third"], BYTES).digest()


@pytest.mark.parametrize("shard_tokens", [1, 7, 500, 1 << 20])
def test_the_digest_is_that_of_the_same_text_in_memory(tmp_path: Path, shard_tokens: int) -> None:
    """So a peer that prepared its text and one that did not can train together."""
    shards = prepared(tmp_path / "out", shard_tokens=shard_tokens)
    memory = tokenize(TEXTS, BYTES)
    assert shards.manifest.digest == memory.digest()
    assert (shards.manifest.num_documents, shards.manifest.empty_documents) == (memory.num_documents, 1)
    assert np.array_equal(shards.corpus().tokens[:], memory.tokens)
    shards.verify()


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text(max_size=40), min_size=4, max_size=30),
    shard_tokens=st.integers(1, 200),
    slots=st.integers(1, 8),
    piece=st.one_of(st.none(), st.integers(2, 20)),
    seed=st.integers(0, 2**63 - 1),
)
def test_batches_are_those_from_memory_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    shard_tokens: int,
    slots: int,
    piece: int | None,
    seed: int,
) -> None:
    texts = [*texts, "some", "more"]
    memory = tokenize(texts, BYTES)
    corpus = prepared(tmp_path_factory.mktemp("shards") / "out", texts, shard_tokens).corpus()
    for ours, theirs in zip(corpus.split(0.3), memory.split(0.3), strict=True):
        assert np.array_equal(ours.starts, theirs.starts)
        a, b = (Slots.cut(each, slots, seed, piece_tokens=piece) for each in (ours, theirs))
        first, second = holding_all(a, 5), holding_all(b, 5)
        for _ in range(20):
            if second.left < 15:
                for reader in (first, second):
                    while reader.left < 15:
                        reader.read_on()
            mine, other = first.next_batch(3), second.next_batch(3)
            assert np.array_equal(mine.inputs, other.inputs)
            assert np.array_equal(mine.targets, other.targets)
        assert first.reads() == second.reads()
        held = [held_out_sequences(each, 7, 4) for each in (ours, theirs)]
        assert np.array_equal(held[0].inputs, held[1].inputs)


def test_a_reader_goes_on_at_any_position_without_reading_what_came_before(tmp_path: Path) -> None:
    shards = prepared(tmp_path / "out")
    slots = Slots.cut(shards.corpus(), 4, 11)
    reader = holding_all(slots, 16)
    for _ in range(5):
        reader.next_batch(2)
    other = Reader(slots, 16)
    reads = 0
    original = Shards.read

    def counted(self: Shards, offset: int, out: np.ndarray) -> None:
        nonlocal reads
        reads += 1
        original(self, offset, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shards, "read", counted)
        ends = {slot: end for slot, _, end in reader.reads()}
        other.hold([(slot, *ends.get(slot, (0, 0))) for slot in range(slots.count)])
        assert reads == 0
    assert np.array_equal(other.next_batch(2).targets, reader.next_batch(2).targets)


def test_tokens_stay_in_their_files(tmp_path: Path) -> None:
    """All that opening, splitting and shuffling take is for documents, not for tokens."""
    shards = prepared(tmp_path / "out", ["x" * 100_000] * 100, shard_tokens=3_000_000)
    tracemalloc.start()
    train, _ = shards.corpus().split(0.1)
    slots = Slots.cut(train, 16, 5)
    holding_all(slots, 64).next_batch(4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < shards.manifest.num_tokens * 2 / 20


# ---- mixing --------------------------------------------------------------------------------------------------


def two(tmp_path: Path) -> list[Shards]:
    return [
        prepared(tmp_path / "letters", ["a" * 9] * 100),  # 1,000 tokens
        prepared(tmp_path / "digits", [str(i % 10) * 9 for i in range(30)]),  # 300
    ]


def share_of(corpus: ShardCorpus, letters: bytes) -> float:
    counts = Counter(bytes(corpus.tokens[1:].astype(np.uint8)))
    return sum(counts[byte] for byte in letters) / (0.9 * corpus.num_tokens)


def test_a_mix_has_the_shares_that_were_asked_for(tmp_path: Path) -> None:
    parts = two(tmp_path)
    corpus, shares = mix(parts, [0.5, 0.5], 7)
    assert share_of(corpus, b"a") == pytest.approx(0.5, abs=0.01)
    assert [share.passes for share in shares] == pytest.approx([1.0, 1000 / 300], abs=0.05)
    texts = Counter(
        bytes(corpus.tokens[a : b - 1].astype(np.uint8)) for a, b in pairwise(corpus.starts.tolist())
    )
    assert texts[b"a" * 9] == 100, "the longer one is read once"
    assert {count for text, count in texts.items() if text[0] != ord("a")} <= set(range(9, 13))


def test_without_weights_every_document_is_there_once(tmp_path: Path) -> None:
    corpus, shares = mix(two(tmp_path), [], 7)
    assert (corpus.num_documents, corpus.num_tokens) == (130, 1300)
    assert [share.passes for share in shares] == [1.0, 1.0]


def test_a_mix_depends_on_the_seed_and_the_weights_alone(tmp_path: Path) -> None:
    parts = two(tmp_path)
    one, again, other = (mix(parts, [3, 2], seed)[0] for seed in (1, 1, 2))
    assert np.array_equal(one.tokens[:], again.tokens[:])
    assert one.digest() == again.digest()
    assert not np.array_equal(one.tokens[:], other.tokens[:])
    assert mix(parts, [2, 3], 1)[0].digest() != one.digest()


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    parts = two(tmp_path)
    with pytest.raises(ConfigError, match=r"data.weights has 1 numbers and data.shards 2 entries"):
        mix(parts, [1.0], 1)
    other = shard_format.TokenizerIdentity("mine.json", "ab" * 32, 300, 0)
    prepare(["x", "y"], BYTES, other, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"two tokenizers, bytes and mine\.json"):
        mix([parts[0], open_shards(str(tmp_path / "other"), tmp_path)], [], 1)
    with pytest.raises(ConfigError, match=r"was prepared with tokenizer mine\.json"):
        open_prepared([str(tmp_path / "other")], [], 1, identity=identity_of("bytes", BYTES), cache=tmp_path)


# ---- damage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["manifest.json", "shard-00000.tokens", "shard-00000.index"])
def test_every_flipped_byte_is_found(tmp_path: Path, file: str) -> None:
    prepared(tmp_path / "out", ["ab", "cd"])
    path = tmp_path / "out" / file
    good = path.read_bytes()
    for at in range(0, len(good), 1 if len(good) < 100 else 37):
        data = bytearray(good)
        data[at] ^= 1
        path.write_bytes(data)
        with pytest.raises(DataError, match="damaged"):
            open_shards(str(tmp_path / "out"), tmp_path).verify()


@pytest.mark.parametrize(
    "changes",
    [
        {"shards": []},
        {"num_tokens": 1 << 62},
        {"num_tokens": -1},
        {"num_documents": 10**12},
        {"item_bytes": 8},
        {"format": 2},
        {"check": "0" * 64},
        {"shards": "x"},
    ],
    ids=str,
)
def test_a_manifest_that_lies_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    prepared(tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(DataError, match="damaged or unfinished"):
        open_shards(str(tmp_path / "out"), tmp_path)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", ".hidden", "manifest.json", "a/b"])
def test_a_file_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    manifest = prepared(tmp_path / "out").manifest
    entry = msgspec.structs.replace(manifest.shards[0], tokens=name)
    lying = msgspec.structs.replace(manifest, shards=(entry, *manifest.shards[1:])).sealed()
    (tmp_path / "out" / "manifest.json").write_bytes(msgspec.json.encode(lying))
    with pytest.raises(DataError, match="is no name for a file"):
        open_shards(str(tmp_path / "out"), tmp_path)


def test_half_a_file_and_a_link_are_named(tmp_path: Path) -> None:
    prepared(tmp_path / "out")
    path = tmp_path / "out" / "shard-00001.tokens"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"shard-00001.tokens .* bytes and should have"):
        open_shards(str(tmp_path / "out"), tmp_path).verify()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="it is a link"):
        open_shards(str(tmp_path / "out"), tmp_path).verify()


# ---- in a run ---


def test_a_run_reads_prepared_text_as_it_reads_the_text_itself(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    assert run(["data", "prep", str(tmp_path / "text.jsonl"), "--out", str(tmp_path / "out")]) == 0
    common = ["data.val_fraction=0.2", "data.seq_len=16", "model.max_seq_len=16"]
    raw = load(None, [*common, f'data.sources=["{tmp_path}/text.jsonl"]'])
    ours = load(None, [*common, f'data.shards=["{tmp_path}/out"]'])
    a, b = load_corpus(raw), load_corpus(ours)
    assert a.digest() == b.digest()
    readers = [
        holding_all(cut_slots(corpus.split(0.2)[0], config), 16) for corpus, config in ((a, raw), (b, ours))
    ]
    while readers[0].left >= 48:
        one, other = (reader.next_batch(3) for reader in readers)
        assert np.array_equal(one.targets, other.targets)


# ---- the commands --------------------------------------------------------------------------------------------


def test_prep_then_stats_then_a_run_reads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.dumps({"text": text}) for text in TEXTS]
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows[:5], "{broken", *rows[5:], '{"text": 3}']) + "\n")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xfa")
    out = tmp_path / "out"
    assert run(["data", "prep", str(tmp_path / "*.*"), "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "1 empty documents and 3 unreadable rows were left out" in said.out
    assert said.err.count("skipped") == 2
    assert run(["data", "stats", str(out), "--verify", "--json"]) == 0
    (stats,) = json.loads(capsys.readouterr().out)["shards"]
    lengths = sorted(len(text.encode()) + 1 for text in TEXTS if text)
    assert (stats["documents"], stats["tokens"], stats["skipped_rows"]) == (len(lengths), sum(lengths), 3)
    assert (stats["lengths"]["0"], stats["lengths"]["1"]) == (lengths[0], lengths[-1])
    assert stats["digest"] == tokenize(TEXTS, BYTES).digest()
    assert run(["data", "stats", str(out)]) == 0
    assert "an epoch: 44 documents" in capsys.readouterr().out


def test_too_many_bad_rows_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "good"}\n' + "{\n" * 5)
    code = run(
        ["data", "prep", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out"), "--max-bad-rows", "4"]
    )
    assert (code, "rows.jsonl:2" in capsys.readouterr().err) == (8, True)
    assert [each.name for each in tmp_path.iterdir()] == ["rows.jsonl"]


def test_no_text_and_a_folder_that_exists_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert run(["data", "prep", str(tmp_path / "empty.txt"), "--out", str(tmp_path / "out")]) == 8
    assert "there is no text: 1 empty documents" in capsys.readouterr().err
    (tmp_path / "full.txt").write_text("text")
    for arguments, expected in (([], 0), ([], 2), (["--force"], 0)):
        code = run(["data", "prep", str(tmp_path / "full.txt"), "--out", str(tmp_path / "out"), *arguments])
        assert code == expected
    assert "--force" in capsys.readouterr().err


def test_a_hub_data_set_without_the_package_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert run(["data", "prep", "hf:some/text", "--out", str(tmp_path / "out")]) == 2
    assert 'pip install "atoll-train[hub]"' in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_ctrl_c_leaves_nothing_half_published(tmp_path: Path) -> None:
    (tmp_path / "first.txt").write_text("text " * 1000)
    work = f"""
import sys
from atoll.cli.main import run
from atoll.data import preparing
def endless(texts):
    yield ["begun"]
    print("begun", flush=True)
    sys.stdin.read()
preparing._batches = endless
sys.exit(run(["data", "prep", {str(tmp_path / "first.txt")!r}, "--out", {str(tmp_path / "out")!r}]))
"""
    with subprocess.Popen(
        [sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        assert len(list(tmp_path.glob(".out.*.partial"))) == 1
        process.send_signal(signal.SIGINT)
        process.wait(30)
    assert process.returncode == 130
    assert sorted(each.name for each in tmp_path.iterdir()) == ["first.txt"]
