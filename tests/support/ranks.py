"""Ranks of one peer as real processes: `python -m support.rank_worker SCENE` for each, meeting through a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.config import environment
from support.nursery import Child
from support.swarm import nursery

TESTS = Path(__file__).parents[1]
WORKER = Path(__file__).with_name("rank_worker.py")


@dataclass
class Ended:
    code: int
    out: str
    err: str


class Ranks:
    """What was started. Output goes to files, so that no pipe can fill up or be held open."""

    def __init__(self, folder: Path, whole: bool = False) -> None:
        """`whole`: with an interpreter of their own, to its very end; else forked from one that has torch loaded."""
        self.folder, self._whole = folder, whole
        self.processes: dict[int, subprocess.Popen[bytes] | Child] = {}

    def start(self, rank: int, num_ranks: int, scene: str, *arguments: str) -> None:
        if not self._whole:
            said = environment.for_rank(rank, num_ranks, self.folder / "meet", {})
            out, err = self._file(rank, "out"), self._file(rank, "err")
            for file in (out, err):
                file.write_bytes(b"")
            self.processes[rank] = nursery().start(WORKER, [scene, *arguments], out, said, err)
            return
        environ = environment.for_rank(rank, num_ranks, self.folder / "meet")
        environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *sys.path])
        with self._file(rank, "out").open("wb") as out, self._file(rank, "err").open("wb") as err:
            self.processes[rank] = subprocess.Popen(
                [sys.executable, "-m", "support.rank_worker", scene, *arguments],
                stdout=out,
                stderr=err,
                env=environ,
            )

    def said(self, rank: int, word: str, within_s: float = 60.0) -> float:
        """Wait until `rank` printed `word`; the time when that was seen."""
        until_s = time.monotonic() + within_s
        while word not in self.text(rank, "out"):
            assert time.monotonic() < until_s, (
                f"rank {rank}: {self.text(rank, 'out')}{self.text(rank, 'err')}"
            )
            assert self.processes[rank].poll() is None, self.text(rank, "err")
            time.sleep(0.01)
        return time.monotonic()

    def send(self, rank: int, number: signal.Signals) -> float:
        assert self.processes[rank].poll() is None, "it has to be alive for the fault to fire"
        self.processes[rank].send_signal(number)
        return time.monotonic()

    def ended(self, rank: int, within_s: float = 60.0) -> Ended:
        code = self.processes[rank].wait(within_s)
        return Ended(code, self.text(rank, "out"), self.text(rank, "err"))

    def all_ended(self, within_s: float = 60.0) -> list[Ended]:
        return [self.ended(rank, within_s) for rank in sorted(self.processes)]

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(60.0)

    def text(self, rank: int, kind: str) -> str:
        return self._file(rank, kind).read_text()

    def _file(self, rank: int, kind: str) -> Path:
        return self.folder / f"rank-{rank}.{kind}"


@contextmanager
def ranks_of(
    folder: Path, num_ranks: int, scene: str, *arguments: str, whole: bool = False
) -> Iterator[Ranks]:
    """`num_ranks` ranks in one scene of `support.rank_worker`; what is left of them at the end is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = Ranks(folder, whole)
    try:
        for rank in range(num_ranks):
            ranks.start(rank, num_ranks, scene, *arguments)
        yield ranks
    finally:
        ranks.kill()
