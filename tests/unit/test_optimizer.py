"""`DiLoCoOptimizer` is a torch.optim.Optimizer to the eye: a lone peer in a real run, with coordinator and engine."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import atoll
from atoll.errors import ConfigError
from support.fake_peer import TOKEN, CoordinatorThread

GOLDEN_ALONE = [1.089297, 2.049694, 2.652032]


class Quadratic(nn.Module):
    """Loss (theta - 2)^2 / 2, started at 0."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(3, dtype=dtype))

    def forward(self) -> torch.Tensor:
        return 0.5 * (self.theta - 2).square().sum()


@contextmanager
def lone(
    tmp_path: Path, model: nn.Module, *, inner_lr: float = 0.1, steps: int = 15, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """A session of one peer, and its optimizer."""
    with (
        pytest.MonkeyPatch.context() as patch,
        CoordinatorThread(tmp_path / "journal", run_settings=None) as coordinator,
    ):
        patch.setenv("ATOLL_TOKEN", TOKEN.decode())
        inner = torch.optim.SGD(model.parameters(), lr=inner_lr)
        address = f"127.0.0.1:{coordinator.port}"
        with atoll.join(
            address, run="run", model=model, optimizer=inner, steps=steps, peer="a", out=None
        ) as session:
            yield session, atoll.DiLoCoOptimizer(session, **{"inner_steps": 5, "codec": "fp32", **options})


def train(session: atoll.Session, optimizer: atoll.DiLoCoOptimizer, model: nn.Module) -> list[float]:
    """Theta after each round."""
    found = []
    while not session.finished():
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        if session.step % 5 == 0:
            found.append(model.theta[0].item())
    return found


def test_a_plain_loop_gives_the_golden_values(tmp_path: Path) -> None:
    model = Quadratic()
    with lone(tmp_path, model) as (session, optimizer):
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert train(session, optimizer, model) == pytest.approx(GOLDEN_ALONE, abs=1e-5)
        assert (session.step, session.version, optimizer.local_epoch, session.members) == (15, 3, 3, ("a",))


def test_param_groups_and_state_are_the_inner_optimizers(tmp_path: Path) -> None:
    model = Quadratic()
    with lone(tmp_path, model) as (_, optimizer):
        assert optimizer.param_groups is optimizer.inner_optimizer.param_groups
        assert optimizer.state is optimizer.inner_optimizer.state
        model().backward()
        optimizer.zero_grad()
        assert model.theta.grad is None
        with pytest.raises(ConfigError, match="can not be added"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_a_scheduler_works_on_it_and_follows_the_runs_step(tmp_path: Path) -> None:
    model = Quadratic()
    with lone(tmp_path, model, steps=20) as (session, optimizer):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 10 else 0.5)
        session.follow(scheduler)
        while not session.finished():
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            scheduler.step()
            assert scheduler.last_epoch == session.step
        # By hand: the pull towards 2 is that of centers 1 and 3, so the two-peer golden values hold here too.
        assert model.theta[0].item() == pytest.approx(3.024414, abs=1e-5)


def test_an_early_end_of_a_round_moves_the_scheduler_to_the_runs_step(tmp_path: Path) -> None:
    model = Quadratic()
    with lone(tmp_path, model, steps=20) as (session, optimizer):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)
        session.follow(scheduler)
        model().backward()
        optimizer.step()
        scheduler.step()
        report = optimizer.finish_round()
        assert report.committed
        assert session.step == 5
        scheduler.step()
        assert scheduler.last_epoch == session.step


def test_closures_work(tmp_path: Path) -> None:
    model = Quadratic()
    with lone(tmp_path, model) as (session, optimizer):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() == pytest.approx(6.0)
        while not session.finished():
            optimizer.step(closure)
        assert model.theta[0].item() == pytest.approx(GOLDEN_ALONE[2], abs=1e-5)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("as_argument", [False, True])
def test_gradient_scaling_and_clipping(tmp_path: Path, unscale: bool, as_argument: bool) -> None:
    model = Quadratic()
    with lone(tmp_path, model) as (session, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        while not session.finished():
            optimizer.zero_grad()
            scaler.scale(model()).backward()
            if unscale:
                target = optimizer.inner_optimizer if as_argument else optimizer
                scaler.unscale_(target)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            if as_argument:
                optimizer.step(scaler=scaler)
            else:
                scaler.step(optimizer)
            scaler.update()
        assert model.theta[0].item() == pytest.approx(GOLDEN_ALONE[2], abs=1e-5)


def test_a_step_that_the_scaler_skips_is_counted(tmp_path: Path) -> None:
    model = Quadratic()
    with lone(tmp_path, model, steps=5) as (session, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number in range(5):
            optimizer.zero_grad()
            loss = model() * (float("inf") if number == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert session.finished()
        # Four real steps of five: theta moved by the pull of four, times the first outer step's 1.33.
        assert model.theta[0].item() == pytest.approx(1.33 * 2 * (1 - 0.9**4), abs=1e-4)


def test_state_dict_round_trips_and_another_version_is_refused(tmp_path: Path) -> None:
    model = Quadratic()
    with lone(tmp_path, model) as (session, optimizer):
        fresh = optimizer.state_dict()
        for _ in range(5):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        saved = optimizer.state_dict()
        assert saved["version"] == 1
        digest = optimizer.outer.state.digest()
        optimizer.outer.state.anchor[:] = 7
        optimizer.load_state_dict(saved)
        assert optimizer.outer.state.digest() == digest
        assert optimizer.param_groups is optimizer.inner_optimizer.param_groups
        with pytest.raises(ConfigError, match="version 0, the run is at version 1"):
            optimizer.load_state_dict(fresh)
        session.finished()


def test_state_dict_holds_what_the_codec_still_owes(tmp_path: Path) -> None:
    model = Quadratic()
    with lone(tmp_path / "fed", model, codec="topk") as (_, optimizer):
        residual = optimizer.outer.feedback.residual
        assert residual is not None
        residual[:] = 3
        saved = optimizer.state_dict()
        residual[:] = 0
        optimizer.load_state_dict(saved)
        assert (residual == 3).all()
    with lone(tmp_path / "not", model, codec="topk", error_feedback=0.0) as (_, optimizer):
        assert optimizer.outer.feedback.residual is None
        assert optimizer.state_dict()["residual"] is None


@pytest.mark.parametrize(
    "options",
    [
        {"outer_optimizer": functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)},
        {
            "outer_optimizer": torch.optim.SGD(
                [nn.Parameter(torch.zeros(1))], lr=0.7, momentum=0.9, nesterov=True
            )
        },
        {"inner_steps": None, "num_inner_steps": 5},
        {"codec": None, "grad_compression": "none"},
        {"scheduler": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1000)},
    ],
)
def test_opendilocos_arguments(tmp_path: Path, options: dict[str, Any]) -> None:
    model = Quadratic()
    with lone(tmp_path, model, **options) as (session, optimizer):
        assert train(session, optimizer, model) == pytest.approx(GOLDEN_ALONE, abs=1e-5)


def test_opendilocos_constructor_joins_by_itself(tmp_path: Path) -> None:
    model = Quadratic()
    with (
        pytest.MonkeyPatch.context() as patch,
        CoordinatorThread(tmp_path / "journal", run_settings=None) as coordinator,
    ):
        patch.setenv("ATOLL_TOKEN", TOKEN.decode())
        patch.chdir(tmp_path)
        with pytest.warns(
            UserWarning, match="all_reduce_strategy, matchmaking_time: the coordinator decides this"
        ):
            optimizer = atoll.DiLoCoOptimizer(
                peers=[f"127.0.0.1:{coordinator.port}"],
                run_id="run",
                params=model.named_parameters(),
                inner_optimizer=functools.partial(torch.optim.SGD, lr=0.1),
                outer_optimizer=functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
                num_inner_steps=5,
                batch_size=16,
                grad_compression="none",
                all_reduce_strategy="WAIT_FOR_ALL",
                matchmaking_time=15.0,
            )
        for _ in range(15):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        assert model.theta[0].item() == pytest.approx(GOLDEN_ALONE[2], abs=1e-5)
        optimizer.shutdown()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"codec": "int9"}, "codec 'int9' is not known; choose one of fp32, bf16, fp16, int8, int4,"),
        ({"inner_steps": 0}, "inner_steps is 0"),
        ({"lr": 0.0}, "lr is 0"),
        ({"weights": "loss"}, "choose"),
        ({"error_feedback": 1.5}, "error_feedback is 1.5; it must be from 0 to 1"),
        ({"outer_optimizer": functools.partial(torch.optim.AdamW, lr=1.0)}, "AdamW; use torch.optim.SGD"),
        (
            {"outer_optimizer": functools.partial(torch.optim.SGD, lr=1.0, weight_decay=0.1)},
            "use torch.optim.SGD",
        ),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match), lone(tmp_path, Quadratic(), **options):
        pass


def test_stages_average_first(tmp_path: Path) -> None:
    model = Quadratic()
    with lone(tmp_path, model, inner_steps=[(5, 5), (0, 5)], steps=10) as (session, optimizer):
        first = train(session, optimizer, model)[0]
        assert first == pytest.approx(2 * (1 - 0.9**5), abs=1e-5)  # the mean itself, not 1.33 times it
        assert optimizer.outer.state.velocity.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_train(tmp_path: Path, dtype: torch.dtype) -> None:
    model = Quadratic(dtype)
    with lone(tmp_path, model) as (session, optimizer):
        found = train(session, optimizer, model)
        assert found == pytest.approx(GOLDEN_ALONE, abs=1e-5 if dtype == torch.float64 else 5e-2)
        assert optimizer.outer.state.anchor.dtype == np.float32


def test_batches_end_with_the_run_and_repeat_the_data(tmp_path: Path) -> None:
    model = Quadratic()
    with lone(tmp_path, model, steps=12) as (session, optimizer):
        seen = []
        for batch in session.batches(range(4)):
            seen.append(batch)
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        assert seen == [0, 1, 2, 3] * 3
        assert session.version == 3  # 5 + 5 + 2 steps


def test_data_that_ends_first_commits_the_last_round(tmp_path: Path) -> None:
    model = Quadratic()
    with lone(tmp_path, model, steps=None) as (session, optimizer):
        for _ in session.batches(range(7)):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        assert session.version == 2
        assert not optimizer.outer.work.steps


def test_the_token_is_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ATOLL_")]:
        monkeypatch.delenv(name)
    with pytest.raises(atoll.errors.Refused, match="ATOLL_TOKEN"):
        atoll.join("127.0.0.1:1", run="run", model=Quadratic(), out=None)


def test_a_last_round_that_is_not_committed_is_no_success(tmp_path: Path) -> None:
    model = Quadratic()

    def train_on_nan() -> None:
        with lone(tmp_path, model, steps=5) as (_, optimizer):
            for _ in range(5):
                optimizer.zero_grad()
                (model() * float("nan")).backward()
                optimizer.step()

    with pytest.raises(atoll.errors.QuorumLost, match="last round was not committed"):
        train_on_nan()
    assert model.theta[0].item() == 0.0, "the work that was refused is gone, the anchor is back"


def test_a_state_saved_inside_a_round_goes_on_inside_it(tmp_path: Path) -> None:
    model = Quadratic()
    with lone(tmp_path, model) as (session, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model().backward()
            optimizer.step(tokens=7)
        saved, weights = optimizer.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
        optimizer.outer.steps_in_round = 0
        optimizer.outer.work.steps = 0
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        assert (session.step, optimizer.outer.work.steps, optimizer.outer.work.tokens) == (3, 3, 21)
        assert train(session, optimizer, model) == pytest.approx(GOLDEN_ALONE, abs=1e-5)


def test_a_round_without_a_finite_loss_ends_the_peer(tmp_path: Path) -> None:
    def train_on_nan() -> None:
        with lone(tmp_path, Quadratic(), steps=50) as (_, optimizer):
            for _ in range(5):
                optimizer.step(tokens=0, loss=float("nan"))

    with pytest.raises(atoll.errors.Diverged, match="none of the 5 inner steps since version 0"):
        train_on_nan()
