"""Tokenizers: bytes, a tokenizer.json trained here, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from atoll.data.tokenizer import ByteTokenizer, load_tokenizer
from atoll.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json", special=["<|endoftext|>"])


def train(path: Path, special: list[str]) -> Path:
    """A small byte-level BPE, exported with the truncation and padding that published files often carry."""
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 20, trainer)
    bpe.enable_truncation(max_length=4)
    bpe.enable_padding(length=4)
    bpe.save(str(path))
    return path


def test_bytes_come_back_and_need_256_ids() -> None:
    tokenizer = load_tokenizer("bytes", 256)
    text = "naïve\n\tcafé 😀"
    tokens, lengths = tokenizer.encode_batch([text, "", "ab"])
    assert tokens.dtype == np.uint16
    assert lengths == [len(text.encode()), 0, 2]
    assert tokenizer.decode(tokens[: lengths[0]]) == text
    assert tokenizer.separator_id < tokenizer.vocab_size == 256
    assert tokenizer.decode([0xE9, 0x41]) == "\ufffdA"
    assert isinstance(tokenizer, ByteTokenizer)


def test_tokenizer_json_loses_nothing_to_truncation_or_padding(tokenizer_json: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_json), 300)
    texts = ["the quick brown fox jumps over the lazy dog, naïve café 😀", "a", ""]
    tokens, lengths = tokenizer.encode_batch(texts)
    ends = np.cumsum(lengths)
    assert tokens.dtype == np.uint16
    assert [tokenizer.decode(t) for t in np.split(tokens, ends[:-1])] == texts
    assert lengths[0] < len(texts[0].encode())
    assert tokenizer.decode([tokenizer.separator_id]) == "<|endoftext|>"
    assert tokens.max() < tokenizer.vocab_size == 280


def test_a_tokenizer_larger_than_the_model_names_both(tokenizer_json: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 280 tokens, but model.vocab_size is 256"):
        load_tokenizer(str(tokenizer_json), 256)
    with pytest.raises(ConfigError, match=r"'bytes' has 256 tokens, but model.vocab_size is 128"):
        load_tokenizer("bytes", 128)


def test_a_tokenizer_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json' does not exist"):
        load_tokenizer(str(tmp_path / "nowhere.json"), 256)
    pytest.importorskip("tokenizers")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"broken\.json' is no tokenizer\.json"):
        load_tokenizer(str(tmp_path / "broken.json"), 256)
    with pytest.raises(ConfigError, match=r"no end-of-document token; add one of <\|endoftext\|>"):
        load_tokenizer(str(train(tmp_path / "plain.json", special=[])), 300)


def test_without_the_package_the_install_line_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r'pip install "atoll-train\[data\]"'):
        load_tokenizer(str(tmp_path / "tokenizer.json"), 256)
