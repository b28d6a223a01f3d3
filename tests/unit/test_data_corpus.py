"""The corpus: its layout, digest and split; and the errors of a corpus that holds too little."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from atoll.data.corpus import Corpus, read_corpus, tokenize
from atoll.data.sources import STDLIB
from atoll.data.tokenizer import ByteTokenizer
from atoll.errors import DataError
from atoll.events import RowsSkipped

BYTES = ByteTokenizer()


def corpus_of(*texts: str) -> Corpus:
    return tokenize(texts, BYTES)


def texts_of(corpus: Corpus) -> list[str]:
    return [
        BYTES.decode(corpus.tokens[a : b - 1])
        for a, b in zip(corpus.starts[:-1], corpus.starts[1:], strict=True)
    ]


def test_every_document_stands_between_separators() -> None:
    corpus = corpus_of("ab", "", "c", "")
    assert bytes(corpus.tokens.astype(np.uint8)) == b"\0ab\0c\0"
    assert corpus.starts.tolist() == [1, 4, 6]
    assert (corpus.num_documents, corpus.num_tokens, corpus.empty_documents) == (2, 5, 2)
    assert texts_of(corpus.select(np.array([1, 0, 1]))) == ["c", "ab", "c"]


def test_many_documents_keep_their_order() -> None:
    texts = [f"document {i}" for i in range(1000)]
    assert texts_of(corpus_of(*texts)) == texts


def test_the_digest_tells_any_two_corpora_apart() -> None:
    corpora = [("ab", "c"), ("a", "bc"), ("c", "ab"), ("abc",), ("ab", "c", "d"), ("ab\0c",)]
    assert len({corpus_of(*texts).digest() for texts in corpora}) == len(corpora)
    assert corpus_of("ab", "c").digest() == corpus_of("ab", "", "c").digest()
    # The bytes are fixed for good: peers on different machines compare the result.
    sha = hashlib.sha256(b"atoll corpus 1 2\n" + struct.pack("<3q6H", 1, 4, 6, *b"\0ab\0c\0"))
    assert corpus_of("ab", "c").digest() == sha.hexdigest()


def test_the_split_is_by_document_and_loses_none() -> None:
    texts = [f"document {i}" for i in range(200)]
    train, held_out = corpus_of(*texts).split(0.05)
    assert (train.num_documents, held_out.num_documents) == (190, 10)
    assert sorted(texts_of(train) + texts_of(held_out)) == sorted(texts)


def test_the_split_follows_the_content_not_the_order() -> None:
    texts = [f"document {i}" for i in range(200)]
    _, one = corpus_of(*texts).split(0.1)
    _, other = corpus_of(*reversed(texts)).split(0.1)
    assert sorted(texts_of(one)) == sorted(texts_of(other))


def test_equal_documents_fall_on_the_same_side() -> None:
    texts = [f"document {i % 20}" for i in range(200)]
    train, held_out = corpus_of(*texts).split(0.1)
    assert not set(texts_of(train)) & set(texts_of(held_out))


@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.999])
def test_both_parts_have_a_document(fraction: float) -> None:
    for texts in (("a", "b"), ("a", "b", "c"), ("same", "same")):
        parts = corpus_of(*texts).split(fraction)
        assert all(part.num_documents for part in parts)
        assert sum(part.num_documents for part in parts) == len(texts)


def test_one_document_cannot_be_split() -> None:
    with pytest.raises(DataError, match="single document"):
        corpus_of("alone").split(0.5)


def test_an_empty_corpus_says_what_it_found(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bad.jsonl").write_text("no json\n")
    skipped: list[RowsSkipped] = []
    with pytest.raises(DataError) as caught:
        read_corpus([str(tmp_path)], BYTES, report=skipped.append)
    assert "2 files, 1 empty documents and 1 unreadable rows" in str(caught.value)
    assert "bad.jsonl:1: is no JSON" in str(caught.value)
    assert len(skipped) == 1


def test_the_interpreters_own_sources_are_a_corpus() -> None:
    skipped: list[RowsSkipped] = []
    corpus = read_corpus([STDLIB], BYTES, report=skipped.append)
    assert corpus.num_tokens > 2_000_000
    assert corpus.num_documents > 300
    assert corpus.empty_documents + len(skipped) < 50
