"""Real ranks of one peer: a function of a test file, called on each of R processes that form one gloo group.

results = on_ranks(check, 3, "argument")     # check(rank, num_ranks, "argument"), its result in JSON, by rank
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from support.nursery import Child
from support.swarm import nursery

START_S = 90.0
"""For importing torch on a machine that others use too; a rank that waits for one that failed is ended at once."""


def on_ranks(
    function: Callable[..., Any], num_ranks: int, *arguments: Any, limit_s: float = START_S
) -> list[Any]:
    """What `function(rank, num_ranks, *arguments)` returns on each rank. AssertionError with what a rank said if one
    fails or the limit passes; the others are ended then."""
    with tempfile.TemporaryDirectory() as folder:
        call = json.dumps([inspect.getfile(function), function.__name__, num_ranks, arguments])
        said = [Path(folder, f"{rank}.said") for rank in range(num_ranks)]
        ranks = [
            nursery().start(
                Path(__file__), [folder, str(rank), call], said[rank], {"GLOO_SOCKET_IFNAME": "lo"}
            )
            for rank in range(num_ranks)
        ]
        try:
            _wait(ranks, limit_s)
            failed = [rank for rank, process in enumerate(ranks) if process.returncode]
        finally:
            for process in ranks:
                process.kill()
                process.wait(START_S)
        if failed or any(process.returncode for process in ranks):
            first = failed[0] if failed else 0
            raise AssertionError(f"rank {first} of {num_ranks}:\n{said[first].read_text()[-6000:]}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(num_ranks)]


def _wait(ranks: list[Child], limit_s: float) -> None:
    """Until all have ended, one has failed, or the time is over."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        codes = [process.poll() for process in ranks]
        if None not in codes or any(codes):
            return
        time.sleep(0.02)


def _one_rank(folder: str, rank: int, call: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    path, name, num_ranks, arguments = json.loads(call)
    spec = importlib.util.spec_from_file_location("on_ranks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["on_ranks"] = module
    spec.loader.exec_module(module)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=START_S),
    )
    result = getattr(module, name)(rank, num_ranks, *arguments)
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _one_rank(sys.argv[1], int(sys.argv[2]), sys.argv[3])
