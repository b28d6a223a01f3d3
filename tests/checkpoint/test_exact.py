"""E15: a run that goes on from a checkpoint equals one that never stopped, to the bit; and E15n: not without each part.

A lone peer with dropout, shuffled data, a gradient scaler, a buffer that training reads, and a codec with error
feedback. It is stopped in the middle of a round, after a checkpoint, by an exception in its loop.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn

import atoll
from atoll.diloco.safekeeping import RANDOM, Safekeeping
from atoll.errors import QuorumLost
from atoll.membership.settings import Timeouts
from support.fake_peer import QUICK, TOKEN, CoordinatorThread

ROUNDS, INNER_STEPS, SAVED_AT = 5, 4, 3
WITHOUT = [RANDOM, "inner", "residual", "scaler", "shuffle", "buffers"]


class StoppedError(Exception):
    pass


class Noisy(nn.Module):
    """Its loss needs torch's generator, and a buffer that no parameter tells."""

    heat: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 600), nn.Tanh(), nn.Dropout(0.3), nn.Linear(600, 1))
        self.register_buffer("heat", torch.ones(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.heat *= 1.01
        return self.heat * self.body(rows).square().mean()


class Shuffle:
    """Rows in a random order of its own, epoch after epoch."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(5)
        self._order: list[int] = []

    def take(self, count: int) -> list[int]:
        if len(self._order) < count:
            self._order += torch.randperm(32, generator=self._generator).tolist()
        taken, self._order = self._order[:count], self._order[count:]
        return taken

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state(), "order": self._order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._generator.set_state(state_dict["generator"])
        self._order = state_dict["order"]


@dataclass
class Trained:
    """Each round's digest, by version, and the loss of each step, by number."""

    digests: dict[int, str]
    losses: dict[int, float]


def train(folder: Path, *, stop_in_round: int | None = None, timeouts: Timeouts = QUICK) -> Trained:
    torch.manual_seed(1)
    np.random.seed(1)
    model, shuffle = Noisy(), Shuffle()
    rows = torch.linspace(-1, 1, 32 * 8).reshape(32, 8)
    found = Trained({}, {})
    with CoordinatorThread(
        folder / "journal", run_settings=None, save_rounds=SAVED_AT, timeouts=timeouts
    ) as coordinator:
        address = f"127.0.0.1:{coordinator.port}"
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        steps = ROUNDS * INNER_STEPS
        with atoll.join(
            address,
            run="run",
            model=model,
            optimizer=inner,
            steps=steps,
            peer="a",
            out=None,
            checkpoints=folder / "place",
        ) as session:
            optimizer = atoll.DiLoCoOptimizer(session, inner_steps=INNER_STEPS, codec="topk", lr=0.5)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
            session.hold("scaler", scaler)
            session.hold("shuffle", shuffle)
            while not session.finished():
                session.safe_point()
                loss = model(rows[shuffle.take(6)] * np.random.rand())
                if scaler.get_scale() > 2000:  # a scale that is lost shows
                    loss = loss * 1.001
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                found.losses[session.step] = loss.item()
                optimizer.step(scaler=scaler)
                scaler.update()
                found.digests[session.version] = optimizer.outer.state.digest()
                if session.version == stop_in_round and session.step % INNER_STEPS == 2:
                    raise StoppedError
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATOLL_TOKEN", TOKEN.decode())
        return train(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATOLL_TOKEN", TOKEN.decode())
        with pytest.raises(StoppedError):
            train(folder, stop_in_round=SAVED_AT)
    return folder


@pytest.fixture
def folder(stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN.decode())
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run"


def test_a_resumed_run_equals_one_that_never_stopped_to_the_bit(whole: Trained, folder: Path) -> None:
    resumed = train(folder)
    begin = SAVED_AT * INNER_STEPS
    assert resumed.losses == {step: loss for step, loss in whole.losses.items() if step >= begin}
    assert resumed.digests == {v: digest for v, digest in whole.digests.items() if v >= SAVED_AT}


@pytest.mark.parametrize("part", WITHOUT)
def test_without_a_part_it_does_not(
    whole: Trained, folder: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Safekeeping.resume

    def without(self: Safekeeping, state: Any) -> bool:
        found = original(self, state)
        del self._waiting[part]
        return found

    monkeypatch.setattr(Safekeeping, "resume", without)
    resumed = train(folder)
    assert resumed.digests[SAVED_AT] == whole.digests[SAVED_AT]
    assert resumed.digests[ROUNDS] != whole.digests[ROUNDS]


def test_without_the_outer_momentum_it_is_not_let_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest covers it: no resumed peer can lose it unseen."""
    original = Safekeeping.resume

    def without(self: Safekeeping, state: Any) -> bool:
        found = original(self, state)
        state.velocity[:] = 0
        return found

    monkeypatch.setattr(Safekeeping, "resume", without)
    with pytest.raises(QuorumLost):
        train(folder, timeouts=replace(QUICK, quorum_wait_s=1.0))
