"""Catching up while everything happens at once: sidecars killed, frozen, thawed and started again, slots written anew,
commits, damage in one donor's files. Whatever the order, the joiner arrives at the run's bits, or says why not."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from atoll import kernels
from atoll.recovery.donor import Donor
from support.asking import stage_and_serve
from support.donating import commit_to, crew, name_of, target_of
from support.history import History
from support.joining import Joiner
from support.states import assert_same, flip_byte

pytestmark = pytest.mark.fault

NUMEL = kernels.PIECE + 70_000
MOST_COMMITS = {"topk": 12, "int8": 2}
"""Large updates come slowly: this is not about a run that is too fast."""


class Weather:
    """At every look of the joiner something may happen, to all donors but the last, which stays well and honest."""

    def __init__(self, seed: int, history: History, donors: list[Donor]) -> None:
        self._rng = random.Random(seed)
        self._history, self._donors, self._frozen = history, donors, set[int]()
        self.log: list[str] = []

    def __call__(self) -> None:
        if self._rng.random() > 0.3:
            return
        what = self._rng.choice(["kill", "freeze", "thaw", "start", "stage", "commit", "commit", "damage"])
        donor = self._rng.choice(self._donors[:-1])
        pid = donor.pid
        self.log.append(f"{what} {name_of(donor)}")
        if what == "kill" and pid is not None:
            os.kill(pid, signal.SIGKILL)
        elif what == "freeze" and pid is not None:
            os.kill(pid, signal.SIGSTOP)
            self._frozen.add(pid)
        elif what == "thaw":
            self.calm()
        elif what == "start":
            donor.start_serving()
        elif what == "stage":
            for each in self._donors:
                assert each.stage(self._history.state)
        elif what == "commit" and self._history.state.version < 9 + MOST_COMMITS[self._history.codec]:
            commit_to(self._history, self._donors)
        elif what == "damage" and donor.folder is not None:
            files = [*donor.folder.glob("updates/*.bin"), *donor.folder.glob("snapshots/*-*/*.safetensors")]
            if files:
                path = self._rng.choice(files)
                flip_byte(path, self._rng.randrange(path.stat().st_size))

    def calm(self) -> None:
        for pid in self._frozen:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue
        self._frozen.clear()


def test_whatever_happens_the_bits_are_the_runs(tmp_path: Path, fault_seed: int) -> None:
    rng = random.Random(fault_seed)
    history = History(NUMEL, rng.choice(list(MOST_COMMITS)), seed=fault_seed)
    with crew(tmp_path, rng.randrange(2, 5), max_bytes_per_s=4e6) as donors:
        commit_to(history, donors, 9)
        stage_and_serve(history.state, donors)
        joiner = Joiner(history, donors, trusted=rng.random() < 0.8)
        joiner.state = history.at(rng.choice([0, 0, 8]))
        joiner.during = weather = Weather(fault_seed, history, donors)
        joiner.target = lambda: target_of(history, donors, joiner.trusted)
        try:
            report = joiner.run(deadline_s=90.0, progress_timeout_s=0.7)
        finally:
            print(*weather.log, sep="\n")
            print(*joiner.notes, sep="\n")
            weather.calm()
        assert_same(joiner.state, history.state)
        assert report.version == history.state.version
        assert f"p{len(donors) - 1}" not in joiner.liars()
