"""`atoll data prep` beside the bare tokenizer on the same text and cores: the ratio of their times.

The text is the Python standard library's sources. The tokenizer is a byte-pair one of 2,048 tokens that is trained on a
part of them first (extra `[data]`). Both run in this process, by turns; what is timed of ours includes reading,
hashing, writing and syncing, of the bare one reading and the ids of every document.

    python benchmarks/data_prep.py --turns 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from atoll.data.documents import read_documents
from atoll.data.preparing import identity_of, prepare
from atoll.data.sources import expand_sources
from atoll.data.tokenizer import JsonTokenizer


def texts(megabytes: float) -> list[str]:
    found, size = [], 0
    files = expand_sources(["python-stdlib"])
    for text in read_documents(files, field="text", max_bad_rows=100, report=lambda event: None):
        found.append(text)
        size += len(text)
        if size > megabytes * 1e6:
            break
    return found


def train(documents: list[str], path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=2048, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.save(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=12.0, help="how much text")
    parser.add_argument("--turns", type=int, default=5)
    asked = parser.parse_args()
    documents = texts(asked.mb)
    size_bytes = sum(len(text.encode()) for text in documents)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        train(documents[:200], path)
        tokenizer = JsonTokenizer(path)
        bare = tokenizer._tokenizer
        identity = identity_of(str(path), tokenizer)
        seconds: dict[str, list[float]] = {"bare": [], "prep": []}
        for turn in range(asked.turns + 1):
            for name in ("bare", "prep"):
                began_s = time.perf_counter()
                if name == "bare":
                    for at in range(0, len(documents), 256):
                        encodings = bare.encode_batch_fast(documents[at : at + 256], add_special_tokens=False)
                        tokens = sum(len(encoding.ids) for encoding in encodings)
                    del tokens
                else:
                    prepare(documents, tokenizer, identity, Path(folder) / f"out-{turn}")
                if turn:
                    seconds[name].append(time.perf_counter() - began_s)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    said = {
        "text_bytes": size_bytes,
        "bare_s": medians["bare"],
        "prep_s": medians["prep"],
        "mb_per_s": size_bytes / 1e6 / medians["prep"],
        "ratio": medians["prep"] / medians["bare"],
        "asked": 1.3,
    }
    print(json.dumps({name: round(value, 4) for name, value in said.items()}))


if __name__ == "__main__":
    main()
