"""Sources that are killed or frozen in the middle of a fetch, one after the other: the joiner goes on from the rest."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from atoll import kernels
from atoll.recovery.board import MAX_SECOND_TAKES, Take
from atoll.recovery.donor import Donor
from atoll.recovery.ledger import Ledger
from atoll.recovery.targets import Source
from atoll.recovery.update import PIECE_BYTES
from atoll.recovery.wanted import Wanted
from support.asking import serve, stage_and_serve
from support.donating import commit_to, crew, name_of, staged_shard, target_of
from support.history import History
from support.joining import Joiner
from support.slack import SLACK_S
from support.states import assert_same, copy_of, flip_byte

pytestmark = pytest.mark.fault

NUMEL = 4 * kernels.PIECE
STATE_BYTES = 8 * NUMEL
SILENCE_S = 1.0
RATE = 12e6
"""Of each donor: the fetch takes about a second, so that there is a middle to hit."""


@pytest.fixture
def donors(tmp_path: Path) -> Iterator[list[Donor]]:
    with crew(tmp_path, 3, max_bytes_per_s=RATE) as donors:
        yield donors
        for donor in donors:
            if donor.pid is not None:
                os.kill(donor.pid, signal.SIGCONT)


@pytest.fixture
def history() -> History:
    return History(NUMEL)


def staged(history: History, donors: Sequence[Donor]) -> None:
    commit_to(history, donors, 9)
    stage_and_serve(history.state, donors)
    commit_to(history, donors, 2)


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What came from whom, while it comes."""
    came: Counter[str] = Counter()
    got = Ledger.got

    def got_and_counted(ledger: Ledger, take: Take[Source, Wanted], num_bytes: int) -> None:
        came[take.source.peer] += num_bytes
        got(ledger, take, num_bytes)

    monkeypatch.setattr(Ledger, "got", got_and_counted)
    return came


class Hit:
    """Sends a signal to a donor's sidecar once it has given so many bytes."""

    def __init__(
        self, received: Counter[str], donor: Donor, how: signal.Signals, after_bytes: int = 200_000
    ) -> None:
        assert donor.pid is not None
        self._received, self._peer, self._pid = received, name_of(donor), donor.pid
        self._how, self._after_bytes = how, after_bytes
        self.fired = False

    def __call__(self) -> None:
        if not self.fired and self._received[self._peer] >= self._after_bytes:
            os.kill(self._pid, self._how)
            self.fired = True

    def was_felt(self) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            state = psutil.Process(self._pid).status()
            return state in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
        return True


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_source_that_is_hit_is_gone_on_without(
    donors: list[Donor], history: History, received: Counter[str], how: signal.Signals
) -> None:
    staged(history, donors)
    joiner = Joiner(history, donors)
    joiner.during = hit = Hit(received, donors[1], how)
    report = joiner.run(progress_timeout_s=SILENCE_S)
    assert hit.fired
    assert hit.was_felt()
    assert_same(joiner.state, history.state)
    assert (report.snapshot_version, report.updates) == (9, 2)
    lost_bytes = report.fetched_bytes - STATE_BYTES - 2 * history.updates[10][0].wire_bytes
    assert lost_bytes <= (2 + MAX_SECOND_TAKES) * PIECE_BYTES, "what was on its way, and second takes"
    assert 0 < report.bytes_by_source["p1"] < STATE_BYTES / 2
    assert joiner.longest_silence_s() < 0.5 + SLACK_S


def test_one_is_killed_one_is_frozen_and_the_third_gives_the_rest(
    donors: list[Donor], history: History, received: Counter[str]
) -> None:
    staged(history, donors)
    joiner = Joiner(history, donors)
    killed = Hit(received, donors[0], signal.SIGKILL)
    frozen = Hit(received, donors[1], signal.SIGSTOP)

    def hit_both() -> None:
        killed()
        frozen()

    joiner.during = hit_both
    report = joiner.run(progress_timeout_s=SILENCE_S)
    assert killed.fired
    assert frozen.fired
    assert killed.was_felt()
    assert frozen.was_felt()
    assert_same(joiner.state, history.state)
    assert max(report.bytes_by_source, key=lambda peer: report.bytes_by_source[peer]) == "p2"


def test_all_are_gone_and_one_comes_back(
    donors: list[Donor], history: History, received: Counter[str]
) -> None:
    """The last sources vanish for a while; a joiner waits, and goes on with whom there is."""
    staged(history, donors)
    joiner = Joiner(history, donors)
    pids = [donor.pid or 0 for donor in donors]
    back = threading.Timer(1.5, donors[2].start_serving)
    fired = []

    def hit_all() -> None:
        if not fired and sum(received.values()) > STATE_BYTES / 4:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            back.start()
            fired.append(sum(received.values()))

    joiner.during = hit_all
    joiner.run(progress_timeout_s=SILENCE_S)
    assert fired
    assert fired[0] < STATE_BYTES, "all was there before they were hit"
    back.join()
    assert_same(joiner.state, history.state)


def test_a_snapshot_that_goes_on_all_donors_is_replaced_by_a_newer_one(
    tmp_path: Path, received: Counter[str]
) -> None:
    """Its slots are written again while it is fetched: no mixture passes, another snapshot is taken."""
    history = History(kernels.PIECE + 1000)
    state_bytes = 8 * (kernels.PIECE + 1000)
    with crew(tmp_path, 3, max_bytes_per_s=0.8e6) as donors:
        commit_to(history, donors, 9)
        stage_and_serve(history.state, donors)
        commit_to(history, donors, 2)
        newer = [history.at(10), history.at(11)]
        joiner, fired = Joiner(history, donors), []

        def stage_twice() -> None:
            if not fired and sum(received.values()) > state_bytes / 8:
                fired.append(sum(received.values()))
                for state in newer:
                    for donor in donors:
                        assert donor.stage(state)

        joiner.during = stage_twice
        report = joiner.run(progress_timeout_s=SILENCE_S)
        assert fired
        assert fired[0] < state_bytes / 2
        assert_same(joiner.state, history.state)
        assert report.snapshot_version in (10, 11)


def test_a_liar_a_dead_one_and_an_honest_one(
    donors: list[Donor], history: History, received: Counter[str]
) -> None:
    staged(history, donors)
    liar, dead, honest = donors
    for at in range(4096 + 7, STATE_BYTES, PIECE_BYTES // 2):
        flip_byte(staged_shard(liar, 9), at)
    joiner = Joiner(history, donors)
    joiner.during = hit = Hit(received, dead, signal.SIGKILL)
    joiner.target = lambda: target_of(history, donors if hit.fired and joiner.liars() else [liar, dead])
    joiner.run(progress_timeout_s=SILENCE_S)
    assert hit.fired
    assert_same(joiner.state, history.state)
    assert joiner.liars() == [name_of(liar)]
    assert received[name_of(honest)] > 0


def test_a_slow_source_does_not_hold_the_end_up(tmp_path: Path) -> None:
    """One gives a fiftieth of the others' rate. Its piece alone would take a minute."""
    history = History(NUMEL)
    with crew(tmp_path, 2, max_bytes_per_s=RATE) as fast, crew(tmp_path, 1, max_bytes_per_s=70e3) as (slow,):
        slow._peer = "slow"
        commit_to(history, [slow, *fast], 9)
        stage_and_serve(history.state, [slow, *fast])
        joiner = Joiner(history, [slow, *fast])
        report = joiner.run(progress_timeout_s=10.0)
        assert_same(joiner.state, history.state)
        assert 0 < report.bytes_by_source["slow"] < PIECE_BYTES, "its piece came from another"
        assert report.seconds < PIECE_BYTES / 70e3 / 2 + SLACK_S
        assert report.fetched_bytes - STATE_BYTES <= MAX_SECOND_TAKES * PIECE_BYTES


def test_replaying_goes_on_while_sources_die(
    donors: list[Donor], history: History, received: Counter[str]
) -> None:
    """A peer that was away; every source holds all updates, and all but one are killed."""
    joiner = Joiner(history, donors)
    joiner.state = copy_of(history.state)
    commit_to(history, donors, 5)
    serve(donors)
    hits = [Hit(received, donor, signal.SIGKILL) for donor in donors[:2]]
    joiner.during = lambda: [hit() for hit in hits] and None
    report = joiner.run(progress_timeout_s=SILENCE_S)
    assert all(hit.fired for hit in hits)
    assert_same(joiner.state, history.state)
    assert report.updates == 5
