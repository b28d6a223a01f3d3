"""A crew of real processes decides, shares and adds up; one of one rank does so for nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from atoll.errors import ConfigError, LocalError, QuorumLost, SiblingLost
from atoll.mesh.crew import Crew
from atoll.values import OpId
from support.ranks import TESTS, Ranks, ranks_of


def test_alone_everything_is_trivial() -> None:
    crew = Crew.alone()
    assert (crew.rank, crew.num_ranks, crew.is_lead) == (0, 1, True)
    assert crew.decide(int, lambda: 3) == 3
    assert crew.share(str, "a") == crew.gather(str, "a") == crew.agree(str, lambda: "a") == ["a"]
    table = np.array([2**64 - 1], np.uint64)
    assert crew.sum_tables([table])[0] is table
    crew.set_timeout(1.0)
    crew.listen(on_abort=print, goodbye=print)
    crew.tell_abort(OpId(1, 1))
    crew.check()
    crew.meet()
    with crew.explaining(), pytest.raises(QuorumLost):
        crew.decide(int, _refuse)
    crew.close()


def _refuse() -> int:
    raise QuorumLost("too few")


def test_alone_needs_no_torch() -> None:
    code = (
        "import sys; from atoll.mesh.crew import Crew; Crew.alone().meet(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_values_and_sums_reach_all_ranks(tmp_path: Path, num_ranks: int) -> None:
    with ranks_of(tmp_path, num_ranks, "together") as ranks:
        for each in ranks.all_ended():
            assert (each.code, each.out, each.err) == (0, "together\n", "")


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_an_error_of_one_rank_is_everybodys(tmp_path: Path, num_ranks: int) -> None:
    last = num_ranks - 1
    with ranks_of(tmp_path, num_ranks, "errors") as ranks:
        for rank, each in enumerate(ranks.all_ended()):
            where = f"rank {last}: " if num_ranks > 1 else ""
            slip = "KeyError|'slip'" if rank == 0 else "LocalError|rank 0: KeyError: 'slip'"
            tumble = (
                "ZeroDivisionError|none" if rank == last else f"LocalError|{where}ZeroDivisionError: none"
            )
            said = ["QuorumLost|too few peers", slip, f"DataError|{where}bad row", tumble]
            assert (each.code, each.out.splitlines(), each.err) == (0, said, "")


def test_a_rank_that_is_interrupted_while_it_chooses_leaves_nobody_waiting(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 2, "interrupted") as ranks:
        lead, other = ranks.all_ended()
    assert (lead.code, lead.err) == (130, "")
    assert other.code == 130
    assert other.err == ("atoll: error: rank 0 of this peer ended: stopped by SIGINT; rank 1 ends too\n")


def test_ranks_that_are_done_at_different_times_end_in_order(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 3, "late") as ranks:
        assert [(each.code, each.out, each.err) for each in ranks.all_ended()] == [(0, "", "")] * 3


def test_the_default_group_works_beside_the_crew(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 2, "sharded") as ranks:
        assert [(each.code, each.out, each.err) for each in ranks.all_ended()] == [(0, "sharded\n", "")] * 2


def test_a_rank_that_never_comes_is_named_in_time(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    try:
        ranks.start(0, 3, "together", "1.5")
        ranks.start(2, 3, "together", "1.5")
        for rank, each in zip((0, 2), ranks.all_ended(30.0), strict=True):
            assert each.code == LocalError.exit_code
            assert each.err == (
                f"atoll: error: rank 1 of 3 did not come to {tmp_path / 'meet'} within 1.5 s (this is rank "
                f"{rank}); see what became of it, and start all ranks again\n"
            )
    finally:
        ranks.kill()


def test_torchrun_starts_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environ = {
        "PYTHONPATH": ":".join([str(TESTS), *sys.path]),
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*command, "-m", "support.rank_worker", "together"],
        capture_output=True,
        text=True,
        timeout=100,
        env=environ,
        cwd=tmp_path,
    )
    if done.returncode and "bind" in done.stderr:
        pytest.skip("torchrun cannot bind here")
    assert done.stdout.count("together") == 2, done.stderr
    assert done.returncode == 0


def test_a_lost_siblings_code_is_its_own_or_that_of_the_error() -> None:
    assert SiblingLost("gone").exit_code == 9
    assert SiblingLost("gone", 8).exit_code == 8
    assert issubclass(SiblingLost, LocalError)
    assert not issubclass(SiblingLost, ConfigError)
