"""Peers of several ranks, and of different size, in one run: the golden values, and the bits of one rank each.

Every rank is a process, started as a launcher does; the model is a DTensor cut among them. Values are those of
test_golden.py and test_joining.py, since nothing of the algorithm depends on ranks.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from atoll.checkpoint.folder import CheckpointFolder
from atoll.errors import SiblingLost
from atoll.state.snapshot import read_snapshot
from support.slack import SLACK_S
from support.swarm import FAST, Peer, Swarm, close_to

pytestmark = [pytest.mark.fault, pytest.mark.timeout(150)]

NUMEL = 1000  # 3 ranks have 334, 334 and 332
CENTERS = (1, 3, 8)
TWO = [1.089297, 2.049694, 2.652032]
THREE = [2.178593, 4.099388, 5.304065]


def run(
    folder: Path, ranks: Sequence[int], *arguments: object, extra: dict[int, list[object]] | None = None
) -> Swarm:
    """Peers a, b, ... with so many ranks each, run to their end; all of their processes must exit 0."""
    folder.mkdir(exist_ok=True)
    with Swarm(folder, start_peers=len(ranks)) as swarm:
        for index, count in enumerate(ranks):
            more = (extra or {}).get(index, [])
            swarm.quadratic("abc"[index], CENTERS[index], "--numel", NUMEL, *arguments, *more, ranks=count)
        swarm.finish_well()
    swarm.assert_one_history()
    return swarm


def digests(swarm: Swarm) -> list[str]:
    return [row["digest"] for row in swarm.peers["a"].rounds()]


@pytest.mark.parametrize("ranks", [(2, 2), (1, 2), (3, 1)], ids=str)
def test_two_peers_give_the_bits_of_single_ranks(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    alike = run(tmp_path / "one", (1, 1))
    swarm = run(tmp_path / "many", ranks)
    for peer in swarm.peers.values():
        assert close_to(peer.thetas(), TWO), peer.thetas()
    assert digests(swarm) == digests(alike)


@pytest.mark.parametrize("codec", ["fp32", "int8", "int4"])
def test_one_two_and_three_ranks_reduce_together(tmp_path: Path, codec: str) -> None:
    swarm = run(tmp_path, (1, 2, 3), "--codec", codec)
    a, b, c = swarm.peers.values()
    assert a.thetas() == b.thetas() == c.thetas()
    assert len(a.thetas()) == 3
    if codec == "fp32":
        assert close_to(a.thetas(), THREE), a.thetas()


def test_weights_and_fewer_steps_hold_with_ranks(tmp_path: Path) -> None:
    """E5, E8: the second peer, of two ranks, made 2 of 5 steps."""
    swarm = run(tmp_path, (1, 2), "--rounds", 2, extra={1: ["--steps-made", 2]})
    for peer in swarm.peers.values():
        assert close_to(peer.thetas(), [0.605635, 1.190121]), peer.thetas()


def test_no_inner_step_moves_nothing(tmp_path: Path) -> None:
    """E24: one peer of two ranks takes no step, and contributes nothing."""
    swarm = run(tmp_path, (1, 2), "--rounds", 2, extra={1: ["--steps-made", 0]})
    for peer in swarm.peers.values():
        assert close_to(peer.thetas(), [0.544648, 1.024847]), peer.thetas()
    assert [row["contributors"] for row in swarm.peers["b"].rounds()] == [["a"], ["a"]]


@pytest.mark.parametrize("hit", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_that_loses_a_rank_is_gone_and_the_others_go_on(
    tmp_path: Path, rank: int, hit: signal.Signals
) -> None:
    with Swarm(tmp_path, start_peers=2) as swarm:
        a = swarm.quadratic("a", 1, "--rounds", 4, "--numel", NUMEL)
        b = swarm.quadratic("b", 3, "--rounds", 4, "--numel", NUMEL, "--halt-in-round", 2, ranks=2)
        swarm.wait_for_marker(b)
        pid, left = b.processes[rank].pid, b.processes[1 - rank]
        b.processes[rank].send_signal(hit)
        swarm.wait(
            lambda: left.poll() is not None,
            within_s=FAST["dead_s"] + 5 + SLACK_S,
            what="the end of the rank that is left",
        )
        if hit == signal.SIGKILL:
            assert b.processes[rank].poll() == -hit, "the fault fired"
        else:
            assert psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the fault fired"
        assert left.returncode == SiblingLost.exit_code, b.output()
        swarm.finish_well("a")
    assert close_to(a.thetas(), [1.089297, 2.049694, 2.107384, 1.826982]), a.thetas()
    gone = [each["peer"] for kind in ("PeerLost", "PeerLeft") for each in swarm.events(kind)]
    assert "b" in gone
    assert f"rank {rank} of 2 of this peer is lost" in b.output()
    swarm.assert_one_history()


@pytest.mark.parametrize(("members", "joiner"), [((1, 2), 3), ((2, 1), 1), ((2, 2), 2)], ids=str)
def test_a_joiner_may_have_any_number_of_ranks(tmp_path: Path, members: tuple[int, int], joiner: int) -> None:
    go = tmp_path / "go"
    hold = ["--numel", NUMEL, "--hold-in-round", 1, "--until", go]
    with Swarm(tmp_path, start_peers=2) as swarm:
        a = swarm.quadratic("a", 1, *hold, ranks=members[0])
        b = swarm.quadratic("b", 3, *hold, ranks=members[1])
        swarm.wait(lambda: a.rounds() and b.rounds(), within_s=60, what="the first round")
        c = swarm.quadratic("c", 8, "--numel", NUMEL, "--mark-ready-in-round", 1, ranks=joiner)
        swarm.wait_for_marker(c)
        go.touch()
        swarm.finish_well()
    assert close_to(a.thetas(), [1.089297, 3.138991, 4.701726]), a.thetas()
    assert b.thetas() == a.thetas()
    assert c.thetas() == a.thetas()[1:]
    (caught_up,) = swarm.events("CaughtUp", "c")
    assert (caught_up["version"], caught_up["received_bytes"] > 0) == (1, True)
    swarm.assert_one_history()


def test_a_peer_of_two_ranks_that_was_frozen_catches_up(tmp_path: Path) -> None:
    """All of its ranks are frozen, as when a machine is suspended; thawed they replay what they missed."""
    go = tmp_path / "go"
    most = ["--rounds", 40, "--numel", NUMEL, "--hold-in-round", 30, "--until", go]
    with Swarm(tmp_path, start_peers=2) as swarm:
        a = swarm.quadratic("a", 1, *most, "--round-s", 0.2)
        b = swarm.quadratic("b", 3, *most, ranks=2)
        swarm.wait(lambda: len(b.rounds()) >= 2, within_s=60, what="two rounds")
        for process in b.processes:
            process.send_signal(signal.SIGSTOP)
        swarm.wait(
            lambda: [e["peer"] for e in swarm.events("PeerLost")] == ["b"], within_s=30, what="the loss"
        )
        at = len(a.rounds())
        swarm.wait(lambda: len(a.rounds()) > at + 1, within_s=60, what="rounds without b")
        for process in b.processes:
            process.send_signal(signal.SIGCONT)
        swarm.wait(lambda: swarm.events("CaughtUp", "b"), within_s=60, what="the catch-up")
        go.touch()
        swarm.finish_well()
    (caught_up, *_) = swarm.events("CaughtUp", "b")
    assert caught_up["updates"] > 0 or caught_up["snapshot_version"] is not None
    swarm.assert_one_history()


def saving(swarm: Swarm, name: str, ranks: int, rounds: int, *more: object) -> Peer:
    place = swarm.folder / "place"
    return swarm.quadratic(
        name, 2, "--rounds", rounds, "--numel", NUMEL, "--checkpoints", place, *more, ranks=ranks
    )


@pytest.mark.parametrize(("saved_by", "resumed_by"), [(3, 1), (3, 2), (1, 2), (2, 2)], ids=str)
def test_a_checkpoint_does_not_know_of_ranks(tmp_path: Path, saved_by: int, resumed_by: int) -> None:
    lone = [1.089297, 2.049694, 2.652032, 2.851829]
    with Swarm(tmp_path, start_peers=1, save_rounds=2) as swarm:
        first = saving(swarm, "a", saved_by, 4, "--halt-in-round", 2)
        swarm.wait_for_marker(first)
        folder = CheckpointFolder(swarm.folder / "place")
        swarm.wait(
            lambda: (latest := folder.latest()) is not None and latest.version == 2,
            within_s=60,
            what="the checkpoint",
        )
        swarm.kill_all()
        state = read_snapshot(folder.shared(2))  # every byte is checked
        assert state.anchor.size == NUMEL
        assert close_to(first.thetas(), lone[:2])
        first.marker.unlink()
        first.results.unlink()
        second = saving(swarm, "a", resumed_by, 4)
        swarm.restart_coordinator()
        swarm.finish_well()
    assert close_to(second.thetas(), lone[2:]), second.thetas()
    (resumed,) = swarm.events("Resumed", source="a")
    assert (resumed["version"], resumed["own_part"]) == (2, True)
    assert bool(resumed["remarks"]) == (saved_by != resumed_by)
    swarm.assert_one_history()


def test_a_stop_while_a_peer_of_two_ranks_trains_ends_all_of_them(tmp_path: Path) -> None:
    with Swarm(tmp_path, start_peers=2) as swarm:
        forever = ["--rounds", 10_000, "--numel", NUMEL]
        swarm.quadratic("a", 1, *forever)
        b = swarm.quadratic("b", 3, *forever, ranks=2)
        swarm.wait(lambda: len(b.rounds()) >= 2, within_s=60, what="two rounds")
        for process in b.processes:
            process.send_signal(signal.SIGTERM)
        swarm.wait(
            lambda: all(each.poll() is not None for each in b.processes),
            within_s=5 + SLACK_S,
            what="the end of b",
        )
        assert {each.returncode for each in b.processes} == {143}
        swarm.wait(
            lambda: [e["peer"] for e in swarm.events("PeerLeft")] == ["b"], within_s=10, what="its goodbye"
        )
