"""Does reading data slow training down? Tokens a second with the loader, beside those on one fixed batch.

A small model (the built-in default) trains on prepared text of the standard library's sources: every other step takes
the next batch of a reader, the others one batch that is always the same. The text is shuffled, mapped from files.

    python benchmarks/loader.py --steps 200
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from atoll.config.load import load
from atoll.data.documents import read_documents
from atoll.data.opening import open_shards
from atoll.data.preparing import identity_of, prepare
from atoll.data.reader import Reader
from atoll.data.sources import expand_sources
from atoll.data.tokenizer import ByteTokenizer
from atoll.train.build import cut_slots
from atoll.train.models import build_inner, build_model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="of each kind")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    config = load(None, ["local.threads=1"])
    model = build_model(config)
    inner = build_inner(model, config)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = ByteTokenizer()
        texts = read_documents(
            expand_sources(["python-stdlib"]), field="text", max_bad_rows=100, report=lambda event: None
        )
        out = Path(folder) / "shards"
        prepare(texts, tokenizer, identity_of("bytes", tokenizer), out)
        corpus = open_shards(str(out), out).corpus()
        slots = cut_slots(corpus, config)
        reader = Reader(slots, config.data.seq_len)
        reader.hold((slot, 0, 0) for slot in range(slots.count))
        fixed = reader.next_batch(config.inner.batch_size)
        seconds: dict[str, list[float]] = {"fixed": [], "loader": []}
        reading_s = []
        for step in range(2 * asked.steps + 20):
            name = ("fixed", "loader")[step % 2]
            began_s = time.perf_counter()
            if reader.left < config.inner.batch_size * config.data.seq_len:
                reader.read_on()
            batch = fixed if name == "fixed" else reader.next_batch(config.inner.batch_size)
            read_s = time.perf_counter() - began_s
            inner.step(torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets), step)
            if step >= 20:
                seconds[name].append(time.perf_counter() - began_s)
                if name == "loader":
                    reading_s.append(read_s)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    said = {
        "fixed_step_s": medians["fixed"],
        "loader_step_s": medians["loader"],
        "reading_s": statistics.median(reading_s),
        "ratio": medians["fixed"] / medians["loader"],
        "asked": 0.98,
    }
    print(json.dumps({name: round(value, 6) for name, value in said.items()}))


if __name__ == "__main__":
    main()
