"""Runs that are killed and started again go on from their checkpoints: the golden values, and K11, K12.

`kill -9` at random moments, of a trainer, its writer, a sidecar: `latest` always leads to a whole, finite state. The
random test prints its seed; one seed again: pytest tests/fault/test_resume.py --seed N. `--seeds 30` is the long form.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from atoll.checkpoint.folder import CheckpointFolder
from atoll.errors import LocalError
from atoll.state.snapshot import read_snapshot
from support.swarm import Swarm, close_to

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

KILLS = 4
LONG_ROUND_S = 6.0  # long enough to catch up in
VICTIMS = {"writer": "atoll.checkpoint.writer", "sidecar": "atoll.recovery.sidecar"}


def start(swarm: Swarm, *names: str, halt_in_round: int | None = None, round_s: float = 0.0) -> None:
    centers = {"a": 1, "b": 3, "c": 8}
    for name in names:
        options: list[object] = ["--rounds", 4, "--checkpoints", swarm.folder / f"place-{name}"]
        options += ["--round-s", round_s]
        if halt_in_round is not None:
            options += ["--halt-in-round", halt_in_round]
        swarm.quadratic(name, centers[name], *options)


def saved(swarm: Swarm, *names: str, version: int) -> bool:
    found = [CheckpointFolder(swarm.folder / f"place-{name}").latest() for name in names]
    return all(latest is not None and latest.version >= version for latest in found)


def killed_after_round_two(swarm: Swarm, round_s: float = 0.0) -> None:
    """Two peers are in their third round, and have saved the second, when everything is killed."""
    start(swarm, "a", "b", halt_in_round=2, round_s=round_s)
    for peer in swarm.peers.values():
        swarm.wait_for_marker(peer)
    swarm.wait(lambda: saved(swarm, "a", "b", version=2), within_s=60, what="the checkpoints")
    swarm.kill_all()
    for peer in list(swarm.peers.values()):
        assert close_to(peer.thetas(), [1.089297, 2.049694])
        peer.marker.unlink()
        peer.results.unlink()
    swarm.peers.clear()


def test_all_killed_at_once_and_started_in_another_order_make_one_history(tmp_path: Path) -> None:
    """2.022628 in the third round would be a momentum that was lost."""
    with Swarm(tmp_path, start_peers=2, save_rounds=2) as swarm:
        killed_after_round_two(swarm)
        start(swarm, "b", "a")
        swarm.restart_coordinator()
        swarm.finish_well()
        for peer in swarm.peers.values():
            assert close_to(peer.thetas(), [2.652032, 2.851829]), peer.thetas()
        swarm.assert_one_history()
        for name in ("a", "b"):
            (resumed,) = swarm.events("Resumed", source=name)
            assert (resumed["version"], resumed["own_part"], resumed["remarks"]) == (2, True, [])


def test_peers_with_checkpoints_of_different_age_go_on_from_the_newest(tmp_path: Path) -> None:
    """b has lost its newest one, and catches up while a is in its third round."""
    with Swarm(tmp_path, start_peers=2, save_rounds=1) as swarm:
        killed_after_round_two(swarm, round_s=1.0)
        CheckpointFolder(swarm.folder / "place-b").delete(2)
        start(swarm, "a", round_s=LONG_ROUND_S)
        start(swarm, "b")
        swarm.restart_coordinator()
        swarm.finish_well()
        for peer in swarm.peers.values():
            assert close_to(peer.thetas(), [2.652032, 2.851829]), peer.thetas()
        (caught_up,) = swarm.events("CaughtUp", source="b")
        assert (caught_up["from_version"], caught_up["version"]) == (1, 2)
        swarm.assert_one_history()


def test_resumed_by_one_peer_more(tmp_path: Path) -> None:
    """c has nothing, and takes all from the others while they are in their third round."""
    with Swarm(tmp_path, start_peers=2, save_rounds=2) as swarm:
        killed_after_round_two(swarm)
        start(swarm, "c")
        start(swarm, "a", "b", round_s=LONG_ROUND_S)
        swarm.restart_coordinator()
        swarm.finish_well()
        for peer in swarm.peers.values():
            assert close_to(peer.thetas(), [3.741329, 4.901523]), peer.thetas()
        swarm.assert_one_history()


def test_resumed_by_one_peer_less(tmp_path: Path) -> None:
    with Swarm(tmp_path, start_peers=2, save_rounds=2) as swarm:
        killed_after_round_two(swarm)
        start(swarm, "a")
        swarm.restart_coordinator()
        swarm.finish_well()
        assert close_to(swarm.peers["a"].thetas(), [2.107384, 1.826982]), swarm.peers["a"].thetas()


def test_latest_always_leads_to_a_whole_state_whoever_is_killed(tmp_path: Path, fault_seed: int) -> None:
    chance = random.Random(fault_seed)
    with Swarm(tmp_path, start_peers=2, save_rounds=1, dead_s=2.0) as swarm:
        options = ["--rounds", 100_000, "--numel", 50_000, "--round-s", 0.05]
        for name, center in (("a", 1), ("b", 3)):
            swarm.quadratic(name, center, *options, "--checkpoints", tmp_path / f"place-{name}")
        swarm.wait(lambda: saved(swarm, "a", "b", version=1), within_s=90, what="the first checkpoint")
        for _ in range(KILLS):
            time.sleep(chance.uniform(0.0, 0.4))  # the moment is what is random
            before = committed(swarm)
            victim = kill(swarm, chance.choice(["trainer", "writer", "sidecar"]))
            check(swarm)
            if swarm.peers["a"].process.poll() is not None:
                swarm.quadratic("a", 1, *options, "--checkpoints", tmp_path / "place-a")
            swarm.wait(
                lambda before=before: saved(swarm, "a", "b", version=before + 2),
                within_s=90,
                what=f"saves after the {victim} was killed (seed {fault_seed})",
            )
            check(swarm)
        swarm.assert_one_history()


def committed(swarm: Swarm) -> int:
    return max(event["version"] for event in swarm.events("RoundCommitted"))


def kill(swarm: Swarm, victim: str) -> str:
    """The trainer is a's, as is the writer; the sidecar is b's. It has one once somebody wanted a snapshot: before that
    the writer is killed in its place. Returns who was, for certain."""
    if victim == "trainer":
        swarm.peers["a"].send(signal.SIGKILL)
        assert swarm.peers["a"].process.wait(timeout=10) == -signal.SIGKILL
        return victim
    if victim == "sidecar" and not children(swarm, "b", victim):
        victim = "writer"
    peer = "a" if victim == "writer" else "b"
    swarm.wait(lambda: bool(children(swarm, peer, victim)), within_s=30, what=f"a {victim} to be killed")
    (child,) = children(swarm, peer, victim)
    child.kill()
    # Its parent, which trains, may take a while to ask for its exit code.
    swarm.wait(
        lambda: child not in children(swarm, peer, victim), within_s=10, what=f"the death of the {victim}"
    )
    return victim


def children(swarm: Swarm, peer: str, kind: str) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(swarm.peers[peer].process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if VICTIMS[kind] in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def check(swarm: Swarm) -> None:
    """A writer may be at work meanwhile: then what `latest` said a moment ago may have been replaced by a newer one."""
    for name in ("a", "b"):
        folder = CheckpointFolder(swarm.folder / f"place-{name}")
        for _ in range(20):
            latest = folder.latest()
            assert latest is not None
            try:
                state = read_snapshot(folder.shared(latest.version))
            except LocalError:
                assert folder.latest() != latest, f"latest of {name} leads to what is not whole"
                continue
            assert state.version == latest.version
            assert np.isfinite(state.anchor).all()
            assert np.isfinite(state.velocity).all()
            break


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_committed_but_not_saved_is_made_again(tmp_path: Path, ranks: int) -> None:
    """The journal is at version 3, and all that is left is version 2: after `relearn_s` the run goes back to it, and
    the peers, which were told to catch up with what nobody has, go on from what they hold."""
    with Swarm(tmp_path, start_peers=2, save_rounds=2, relearn_s=3.0, dead_s=2.0) as swarm:
        place = ["--rounds", 4, "--numel", 10, "--checkpoints"]
        hold = ["--halt-in-round", 3]
        for name, center in (("a", 1), ("b", 3)):
            swarm.quadratic(name, center, *place, swarm.folder / f"place-{name}", *hold, ranks=ranks)
        for peer in swarm.peers.values():
            swarm.wait_for_marker(peer)
        swarm.wait(lambda: saved(swarm, "a", "b", version=2), within_s=60, what="the checkpoints")
        swarm.kill_all()
        for name, peer in list(swarm.peers.items()):
            assert close_to(peer.thetas(), [1.089297, 2.049694, 2.652032]), name
            peer.results.unlink()
        swarm.peers.clear()
        for name, center in (("a", 1), ("b", 3)):
            swarm.quadratic(name, center, *place, swarm.folder / f"place-{name}", ranks=ranks)
        swarm.restart_coordinator()
        swarm.finish_well()
        assert swarm.events("VersionLearned"), "the run went back"
        for peer in swarm.peers.values():
            assert close_to(peer.thetas(), [2.652032, 2.851829]), peer.thetas()
        swarm.assert_one_history()
