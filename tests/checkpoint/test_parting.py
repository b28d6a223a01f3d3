"""A peer that has to go because the run cannot go on keeps the newest version that it holds."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn

import atoll
from atoll.checkpoint.folder import CheckpointFolder
from atoll.checkpoint.resume import newest
from atoll.errors import QuorumLost, Unreachable
from support.fake_peer import QUICK, TOKEN, CoordinatorThread

EVERY, ENDED_AT, INNER_STEPS = 2, 3, 4
"""Version 2 is saved; the coordinator goes while the fourth round is made."""


class StoppedError(Exception):
    pass


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, *, by: str) -> None:
    """One peer whose coordinator goes for good in the middle of a round, or that is stopped there."""
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN.decode())
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with contextlib.ExitStack() as stack:
        coordinator = CoordinatorThread(
            folder / "journal", run_settings=None, save_rounds=EVERY, timeouts=QUICK
        )
        stack.enter_context(coordinator)
        with atoll.join(
            coordinator.address,
            run="run",
            model=model,
            optimizer=inner,
            peer="a",
            steps=10 * INNER_STEPS,
            out=None,
            checkpoints=folder / "place",
        ) as session:
            optimizer = atoll.DiLoCoOptimizer(session, inner_steps=INNER_STEPS)
            while not session.finished():
                session.safe_point()
                if session.version == ENDED_AT and session.loop.steps_in_round == 1:
                    if by == "stop":
                        raise StoppedError
                    stack.close()
                model(torch.ones(2, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


def test_who_loses_the_coordinator_saves_the_version_that_no_save_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((Unreachable, QuorumLost)):
        train(tmp_path, monkeypatch, by="the coordinator's end")
    folder = CheckpointFolder(tmp_path / "place")
    latest = folder.latest()
    assert latest is not None
    assert latest.version == ENDED_AT
    assert folder.own_versions("a") == [EVERY], "inside a round there is no own part of that version"
    found = newest(tmp_path / "place", run="run", peer="a", numel=5, emit=lambda event: None)
    assert found is not None
    assert found.state.version == ENDED_AT
    assert found.own is not None
    assert found.own[0].version == EVERY


def test_who_is_stopped_does_not_wait_for_another_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoppedError):
        train(tmp_path, monkeypatch, by="stop")
    assert CheckpointFolder(tmp_path / "place").all_versions() == [EVERY]
