"""E30: whatever peers do, every document of an epoch is consumed exactly once by committed rounds.

Real processes read 500 numbered documents, shuffled, in 40 slots. They join, leave, are killed, stand still past the
deadline, and are all killed at once, the coordinator's journal lost with them, and go on from their checkpoints. What
counts is what the trainers found in their batches, in the rounds of which the coordinator says that they are committed.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.checkpoint.folder import CheckpointFolder
from support.reading_peer import NUM_DOCUMENTS, NUM_SLOTS, length_of
from support.swarm import Peer, Swarm, nursery

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

READING = Path(__file__).parents[1] / "support" / "reading_peer.py"
SAVE_ROUNDS = 3
IMPATIENT = {"dead_s": 2.0, "relearn_s": 2.0, "grace_s": 0.3, "freeze_s": 0.5}


class Readers(Swarm):
    """A swarm of reading peers."""

    def __init__(
        self,
        folder: Path,
        *,
        start_peers: int,
        save_rounds: int = 0,
        policy: str = "deadline",
        **waits: float,
    ) -> None:
        super().__init__(
            folder,
            start_peers=start_peers,
            run="reading",
            save_rounds=save_rounds,
            policy=policy,
            **{**IMPATIENT, **waits},
        )

    def reader(self, name: str, *arguments: object, step_s: float = 0.01) -> Peer:
        results, log = self.folder / f"{name}.results", self.folder / f"{name}.log"
        command = ["--address", self.address, "--peer", name, "--results", str(results)]
        command += ["--out", str(self.folder), "--step-s", str(step_s)]
        process = nursery().start(READING, [*command, *map(str, arguments)], log)
        self.peers[name] = Peer(name, process, results, self.folder / f"{name}.marker", log)
        return self.peers[name]

    def committed(self) -> list[tuple[str, list[list[int]]]]:
        """(peer, reads) of all committed work in the run's one history."""
        found: list[tuple[int, str, list[list[int]]]] = []
        learned: int | None = (
            None  # a coordinator may learn one version after the other: the last is where it goes on
        )
        for event in [*self.events(), {"type": "SlotsRead", "version": -1, "committed": {}}]:
            if event["type"] == "VersionLearned":
                learned = event["version"]
            elif event["type"] == "SlotsRead":
                if learned is not None:
                    found = [each for each in found if each[0] <= learned]
                learned = None
                found += [(event["version"], peer, reads) for peer, reads in event["committed"].items()]
        return [(peer, reads) for _, peer, reads in found]

    def read_by_version(self) -> dict[int, dict[str, list[list[int]]]]:
        """What was read for each version; of one that was made again, the last."""
        return {event["version"]: event["committed"] for event in self.events("SlotsRead")}

    def version(self) -> int:
        return max((event["version"] for event in self.events("RoundCommitted")), default=0)

    def wait_for_version(self, version: int) -> None:
        self.wait(lambda: self.version() >= version, within_s=60, what=f"version {version}")

    def epoch_is_read(self) -> bool:
        ends = {read[0]: read[3] for _, reads in self.committed() for read in reads}
        return len(ends) == NUM_SLOTS and min(ends.values()) >= 1

    def consumed(self, epoch: int) -> Counter[int]:
        """Tokens of each document in that epoch, as the trainers found them in their batches."""
        trained: dict[tuple[str, str], list[list[int]]] = {}
        for name in {peer for peer, _ in self.committed()}:
            for line in (self.folder / f"{name}.results").read_text().splitlines():
                row = json.loads(line)
                trained[name, json.dumps(row["reads"])] = row["taken"]
        found: Counter[int] = Counter()
        for peer, reads in self.committed():
            for read_in, document, tokens in trained[peer, json.dumps(reads)]:
                found[document] += tokens * (read_in == epoch)
        return found


def whole() -> dict[int, int]:
    return {document: length_of(document) for document in range(NUM_DOCUMENTS)}


def test_every_document_is_consumed_exactly_once(tmp_path: Path, fault_seed: int) -> None:
    chance = random.Random(fault_seed)
    with Readers(tmp_path, start_peers=3, save_rounds=1) as swarm:
        start(swarm, "a", "b", "c")
        swarm.wait_for_version(2)
        start(swarm, "d")
        left_out, killed, leaving = chance.sample("abc", 3)
        swarm.peers[left_out].send(signal.SIGSTOP)
        stood_at = swarm.version()
        # At the deadline where it was not ready; else, in an attempt, once it is taken for dead.
        swarm.wait(
            lambda: any(
                e["version"] > stood_at and left_out not in e["contributors"]
                for e in swarm.events("RoundCommitted")
            ),
            within_s=60,
            what="a round without the one that stands still",
        )
        swarm.peers[left_out].send(signal.SIGCONT)
        # Without a member that stays, the run would be over with the last that leaves.
        swarm.wait(
            lambda: any(e["peer"] == "d" for e in swarm.events("PeerJoined")), within_s=60, what="the joiner"
        )
        swarm.peers[killed].send(signal.SIGKILL)
        swarm.wait(
            lambda: any(e["peer"] == killed for e in swarm.events("PeerLost")), within_s=60, what="the loss"
        )
        swarm.peers[leaving].send(signal.SIGTERM)
        swarm.wait(lambda: swarm.events("PeerLeft"), within_s=60, what="the goodbye")
        swarm.wait(
            lambda: sum(e["peer"] == left_out for e in swarm.events("PeerJoined")) >= 2,
            within_s=60,
            what="the return of the one that stood still",
        )
        at = swarm.version()
        assert at > stood_at
        swarm.wait_for_version(at + chance.randint(1, 3))
        swarm.wait(lambda: saved(tmp_path, "d", left_out), within_s=60, what="checkpoints of both")
        assert not swarm.epoch_is_read(), "the epoch was over before the worst came"
        # All at once, and the journal with them: what was read is known from the checkpoints alone.
        swarm.kill_all()
        swarm.journal.unlink()
        start(swarm, "d", left_out, "e")
        swarm.restart_coordinator()
        swarm.wait(swarm.epoch_is_read, within_s=90, what="the end of the epoch")
        learned = swarm.events("VersionLearned")
        assert [event["version"] for event in learned][-1] > 0
        assert not swarm.events("OldPositionsUsed")
        returned = {event["peer"] for event in swarm.events("SlotsReturned")}
        assert {killed, leaving} <= returned
        assert swarm.consumed(0) == whole()


def test_a_run_that_is_resumed_reads_what_it_would_have_read(tmp_path: Path) -> None:
    """By the same peers, in the same slots, to the token; with nothing but their checkpoints."""
    with steady(tmp_path / "whole") as swarm:
        swarm.wait_for_version(30)
        whole = swarm.read_by_version()
    with steady(tmp_path / "killed") as swarm:
        stop_between_saves(swarm, "a", "b")
        swarm.kill_all()
        swarm.journal.unlink()
        start(swarm, "b", "a")
        swarm.restart_coordinator()
        swarm.wait(lambda: swarm.events("VersionLearned"), within_s=60, what="the run to go on")
        begun_at = swarm.events("VersionLearned")[-1]["version"]
        swarm.wait_for_version(begun_at + 6)
        resumed = swarm.read_by_version()
    common = sorted(whole.keys() & resumed.keys())
    assert common[-1] >= begun_at + 6
    assert {version: resumed[version] for version in common} == {
        version: whole[version] for version in common
    }


@contextlib.contextmanager
def steady(folder: Path) -> Iterator[Readers]:
    """Two peers in a run in which nobody is left out, nor gone on without where the machine is busy."""
    folder.mkdir()
    with Readers(
        folder, start_peers=2, save_rounds=SAVE_ROUNDS, policy="wait", dead_s=8.0, relearn_s=8.0
    ) as swarm:
        start(swarm, "a", "b")
        yield swarm


def start(swarm: Readers, *names: str) -> None:
    for name in names:
        swarm.reader(name, "--checkpoints", swarm.folder / f"place-{name}")


def stop_between_saves(swarm: Readers, *names: str) -> None:
    """Halt the coordinator, and with it all rounds, at a moment when all have saved the same version: who has an older
    one would come late to the run that goes on."""

    def all_saved_it() -> bool:
        found = [CheckpointFolder(swarm.folder / f"place-{name}").latest() for name in names]
        versions = {latest.version if latest is not None else 0 for latest in found}
        return len(versions) == 1 and swarm.version() < min(versions) + SAVE_ROUNDS

    swarm.wait(lambda: saved(swarm.folder, *names), within_s=60, what="checkpoints of all")
    while True:
        swarm.coordinator.send_signal(signal.SIGSTOP)
        ends_s = time.monotonic() + 5.0  # saves that are under way end; no other one begins
        while time.monotonic() < ends_s:
            if all_saved_it():
                return
            time.sleep(0.02)
        # One was skipped, since the writer was behind, or the verdict that named it had reached only some.
        swarm.coordinator.send_signal(signal.SIGCONT)
        swarm.wait_for_version(swarm.version() + 1)


def saved(folder: Path, *names: str) -> bool:
    """Whether these have checkpoints, so that a version of the middle of the run can be gone on from."""
    found = [CheckpointFolder(folder / f"place-{name}").latest() for name in names]
    return all(latest is not None and latest.version > 0 for latest in found)


def test_a_reader_that_is_ahead_of_its_trainer_is_found(tmp_path: Path) -> None:
    """Negative control: positions of a prefetcher, not of the frozen step."""
    with Readers(tmp_path, start_peers=2) as swarm:
        swarm.reader("a", step_s=0.0)
        swarm.reader("b", "--ahead", step_s=0.0)
        swarm.wait(swarm.epoch_is_read, within_s=90, what="the end of the epoch")
        assert swarm.consumed(0) != whole()
