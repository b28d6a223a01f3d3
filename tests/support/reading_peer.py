"""A peer that reads numbered documents in leased slots, and writes down what it read: every token of a document is its
number.

Each line of --results is what stands behind one `ready`: the reads that the coordinator is told, and how many tokens of
which document were really in its batches, by epoch. With --ahead it is a bad reader, which has always taken one batch
more than it trained on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import atoll
from atoll.data.corpus import Corpus
from atoll.data.slots import Slots
from atoll.diloco.schedule import OuterSchedule
from atoll.errors import AtollError
from atoll.membership.leases import Reads
from atoll.train.batches import Batch, Batches

NUM_DOCUMENTS, NUM_SLOTS, SEED = 500, 40, 5
SEQ_LEN, ROWS, INNER_STEPS = 8, 2, 4
PREFETCH = 2


def length_of(document: int) -> int:
    return 3 + document * 7 % 17


def slots() -> Slots:
    lengths = [length_of(number) for number in range(NUM_DOCUMENTS)]
    tokens = np.repeat(np.arange(NUM_DOCUMENTS + 1, dtype=np.uint32), [1, *lengths])
    corpus = Corpus(tokens=tokens, starts=np.cumsum([1, *lengths]))
    return Slots.cut(corpus, NUM_SLOTS, SEED)


class Recorded(Batches):
    """Knows what its batches held."""

    def __init__(self, session: atoll.Session, results: Path) -> None:
        self._text, self._results = slots(), results
        self._taken: Counter[tuple[int, int]] = Counter()
        super().__init__(
            self._text,
            SEQ_LEN,
            ROWS,
            peer=session.peer,
            leaser=session,
            emit=session.events.emit,
            prefetch=PREFETCH,
        )

    def take(self) -> Batch | None:
        before = dict(self._reader._position)
        batch = super().take()
        if batch is None:
            return None
        taken = Counter[tuple[int, int]]()
        for slot, position in self._reader._position.items():
            start, end = self._text.starts[slot : slot + 2].tolist()
            for at in range(before.get(slot, self._reader._begun[slot]), position):
                epoch, token = divmod(at, end - start)
                taken[epoch, int(self._text.tokens[start + token]) - 1] += 1
        targets = Counter((batch.targets.ravel() - 1).tolist())
        by_document: Counter[int] = Counter()
        for (_, document), count in taken.items():
            by_document[document] += count
        assert by_document == targets, "the reader says that it stands elsewhere"
        self._taken += taken
        return batch

    def begin(self) -> None:
        super().begin()
        self._taken.clear()

    def reads(self) -> Reads:
        reads = super().reads()
        if reads:
            told = [[each.slot, *each.start, *each.end] for each in reads]
            taken = [[*key, count] for key, count in self._taken.items()]
            with self._results.open("a") as file:
                file.write(json.dumps({"reads": told, "taken": taken}) + "\n")
        return reads


class Ahead(Recorded):
    """Negative control: takes a batch before it is needed, and tells that as read."""

    def __init__(self, session: atoll.Session, results: Path) -> None:
        self._next: tuple[Batch | None, Counter[tuple[int, int]]] | None = None
        super().__init__(session, results)

    def take(self) -> Batch | None:
        batch, taken = self._next or self._take()
        self._next = self._take()
        self._taken += taken
        return batch

    def begin(self) -> None:
        super().begin()
        self._next = None

    def _take(self) -> tuple[Batch | None, Counter[tuple[int, int]]]:
        kept, self._taken = self._taken, Counter()
        batch = super().take()
        taken, self._taken = self._taken, kept
        return batch, taken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoints", type=Path, default=None)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--ahead", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = torch.nn.Module()
    model.theta = torch.nn.Parameter(torch.zeros(64))
    inner = torch.optim.SGD(model.parameters(), lr=1e-4)
    steps = 10_000 * INNER_STEPS
    with atoll.join(
        args.address,
        run="reading",
        model=model,
        optimizer=inner,
        steps=steps,
        peer=args.peer,
        out=args.out,
        checkpoints=args.checkpoints,
    ) as session:
        batches = (Ahead if args.ahead else Recorded)(session, args.results)
        loop = session.open_rounds(
            OuterSchedule.constant(INNER_STEPS, 0.7, 0.9, True, steps),
            codec="fp32",
            settings={"run.seed": SEED, "outer.codec": "fp32", "outer.weights": "tokens"},
            data=batches,
        )
        while not session.finished():
            session.safe_point()
            if (batch := batches.take()) is None:
                loop.finish_round()
                continue
            time.sleep(args.step_s)
            inner.zero_grad()
            (model.theta - batch.targets.float().mean()).square().sum().backward()
            inner.step()
            loop.step(tokens=batch.targets.numel())


if __name__ == "__main__":
    try:
        main()
    except AtollError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
