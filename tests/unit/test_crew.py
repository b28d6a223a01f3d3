"""A crew of real processes decides, shares and adds up; one of one rank does so for nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from atoll.config.environment import RankEnvironment
from atoll.errors import ConfigError, LocalError, QuorumLost, SiblingLost
from atoll.mesh.crew import Crew
from atoll.mesh.group import listening_host
from atoll.values import OpId
from support.ranks import TESTS, Ranks, ranks_of


def test_alone_everything_is_trivial() -> None:
    crew = Crew.alone()
    assert (crew.rank, crew.num_ranks, crew.is_lead) == (0, 1, True)
    assert crew.decide(int, lambda: 3) == 3
    assert crew.share(str, "a") == crew.agree(str, lambda: "a") == ["a"]
    table = np.array([2**64 - 1], np.uint64)
    assert crew.sum_tables([table])[0] is table
    crew.set_timeout(1.0)
    crew.listen(on_abort=print, goodbye=print)
    crew.tell_abort(OpId(1, 1))
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


def test_a_rank_that_lives_but_does_not_come_is_waited_for_with_a_limit(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 2, "lagging") as ranks:
        lead, other = ranks.all_ended()
    why = (
        "rank 1 of 2 waited 0.2 s in vain for its siblings to come to the same point; they are alive: find where "
        "their training threads stand"
    )
    assert (other.code, other.err) == (9, f"atoll: error: {why}\n")
    assert (lead.code, lead.err) == (
        9,
        f"atoll: error: rank 1 of this peer ended: {why}; rank 0 ends too\n",
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_nobody_serves_or_comes_to_is_one_line(tmp_path: Path, rank: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    code = (
        "from atoll.config.environment import rank_environment; from atoll.mesh.group import meet\n"
        "try: meet(rank_environment(), 1.0)\nexcept Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environ, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.count("\n") == 1
    says = "LocalError rank 1 of 2 did not come to" if rank == 0 else "LocalError rank 1 of 2 cannot meet"
    assert done.stdout.startswith(says), done.stdout + done.stderr
    assert f"127.0.0.1:{port} within 1 s" in done.stdout


def test_where_a_rank_listens() -> None:
    several = {"num_ranks": 2, "master_port": 29500}
    assert listening_host(RankEnvironment(**several, rendezvous="/x")) == "127.0.0.1"
    assert listening_host(RankEnvironment(**several, master_addr="somewhere", local_ranks=2)) == "127.0.0.1"
    assert listening_host(RankEnvironment(**several, master_addr="localhost")) == "127.0.0.1"
    here = RankEnvironment(**several, master_addr="10.9.9.9", local_ranks=1, gloo_interface="lo")
    assert listening_host(here) == "127.0.0.1"
    nowhere = RankEnvironment(**several, master_addr="10.9.9.9", local_ranks=1, gloo_interface="none0")
    with pytest.raises(LocalError, match="GLOO_SOCKET_IFNAME = none0, but no such interface"):
        listening_host(nowhere)


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


@pytest.mark.slow  # torch's own start of two ranks fails now and then on a machine that is full
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
    assert done.stdout.count("together") == 2, done.stderr
    assert done.returncode == 0


def test_a_lost_siblings_code_is_its_own_or_that_of_the_error() -> None:
    assert SiblingLost("gone").exit_code == 9
    assert SiblingLost("gone", 8).exit_code == 8
    assert not issubclass(SiblingLost, LocalError | ConfigError), (
        "what one rank reports as its own is neither"
    )
