"""Siblings that are killed, frozen or fail: whoever is left ends in time, with one line and the documented code."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from support.rank_worker import DEAD_S
from support.ranks import Ranks, ranks_of
from support.slack import SLACK_S

pytestmark = pytest.mark.fault

END_S = 1.0 + 2.0 + 0.5
"""The training thread's grace, the goodbye, the flush: what comes after a loss is noticed."""
KILLED = "its connection closed"
FROZEN = f"no sign of life for dead_s = {DEAD_S:g} s"


def _ready(ranks: Ranks) -> None:
    for rank in ranks.processes:
        ranks.said(rank, "ready")
    time.sleep(0.3)  # into the call that blocks; nothing depends on it


def _assert_line(ranks: Ranks, rank: int, lost: int, how: str) -> None:
    ended = ranks.ended(rank, 30.0)
    num_ranks = len(ranks.processes)
    assert ended.code == 9, ended
    line = f"rank {lost} of {num_ranks} of this peer is lost: {how}; rank {rank} ends too"
    assert ended.err == f"atoll: error: {line}\n"


@pytest.mark.parametrize("scene", ["stuck", "blocked", "deciding"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_takes_its_siblings_with_it_at_once(tmp_path: Path, scene: str, lost: int) -> None:
    with ranks_of(tmp_path, 2, scene, whole=True) as ranks:
        _ready(ranks)
        killed_s = ranks.send(lost, signal.SIGKILL)
        _assert_line(ranks, 1 - lost, lost, KILLED)
        assert time.monotonic() - killed_s < END_S + SLACK_S
        assert ranks.ended(lost).code == -signal.SIGKILL


@pytest.mark.parametrize("scene", ["stuck", "deciding"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_frozen_rank_is_missed_after_dead_s_and_ends_when_it_thaws(
    tmp_path: Path, scene: str, lost: int
) -> None:
    with ranks_of(tmp_path, 2, scene, whole=True) as ranks:
        _ready(ranks)
        frozen_s = ranks.send(lost, signal.SIGSTOP)
        _assert_line(ranks, 1 - lost, lost, FROZEN)
        assert DEAD_S - 0.5 < time.monotonic() - frozen_s < DEAD_S + END_S + SLACK_S
        ranks.send(lost, signal.SIGCONT)
        thawed = ranks.ended(lost, END_S + SLACK_S)
        # What the other one said last may have come, or only the end of its connection.
        assert thawed.code == 9
        assert thawed.err.count("\n") == 1
        assert thawed.err.startswith("atoll: error: rank ")


def test_a_killed_rank_is_named_to_those_that_have_no_connection_with_it(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 3, "blocked") as ranks:
        _ready(ranks)
        ranks.send(2, signal.SIGKILL)
        _assert_line(ranks, 0, 2, KILLED)
        _assert_line(ranks, 1, 2, KILLED)
        assert "goodbye: rank 2 of 3 of this peer is lost" in ranks.text(0, "out")


def test_a_short_freeze_of_all_is_no_loss(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 2, "aborting") as ranks:
        ranks.said(1, "told")
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for rank in (0, 1):
                ranks.send(rank, number)
            time.sleep(DEAD_S + 1.0 if number == signal.SIGSTOP else 0.0)
        assert [(each.code, each.err) for each in ranks.all_ended()] == [(0, "")] * 2


def test_an_abort_reaches_siblings_whose_main_threads_sleep(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 3, "aborting") as ranks:
        ended = ranks.all_ended()
    assert [(each.code, each.err) for each in ended] == [(0, "")] * 3
    for each in ended[:2]:
        assert each.out.splitlines() == ["aborted t1/r2/f0/a3", "woke"]
    assert ended[2].out.splitlines() == ["told", "woke"]


def test_siblings_of_a_rank_that_fails_end_with_its_reason(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 3, "failing") as ranks:
        ended = ranks.all_ended()
    assert [each.code for each in ended] == [8] * 3
    assert ended[1].err == "atoll: error: bad row 17\n"
    for rank in (0, 2):
        assert ended[rank].err == (
            f"atoll: error: rank 1 of this peer ended: bad row 17; rank {rank} ends too\n"
        )
