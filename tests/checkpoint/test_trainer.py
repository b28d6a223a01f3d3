"""`atoll train` goes on from what it saved: the built-in trainer, stopped between two checkpoints and started again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.cli.train import train
from atoll.config.load import load
from atoll.config.schema import RunConfig
from atoll.dashboard.view import Seen
from atoll.errors import ConfigError
from atoll.events import CheckpointsCounted, Event, Resumed, RoundApplied, TrainingStep
from atoll.train.build import run_peer
from support.fake_peer import QUICK, TOKEN, CoordinatorThread

SAVED_AT, ROUNDS, INNER_STEPS = 3, 5, 3


class StoppedError(Exception):
    pass


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(30):
        (folder / f"{number}.txt").write_text(
            "\n".join(f"line {i} of document {number}: {i * number}" for i in range(20))
        )
    return folder


def config_of(
    folder: Path, text: Path, address: str, scope: str, more: Mapping[str, object] | None = None
) -> RunConfig:
    settings = {
        "run.name": "run",
        "run.steps": ROUNDS * INNER_STEPS,
        "model.dim": 16,
        "model.num_layers": 1,
        "model.num_heads": 2,
        "model.num_kv_heads": 1,
        "model.ffn_dim": 32,
        "model.max_seq_len": 32,
        "data.sources": f'["{text}"]',
        "data.seq_len": 32,
        "data.slots": 8,
        "data.scope": scope,
        "inner.batch_size": 4,
        "outer.inner_steps": INNER_STEPS,
        "outer.codec": "topk",
        "eval.sequences": 4,
        "local.coordinator": address,
        "local.peer": "a",
        "local.out": folder,
        "local.threads": 1,
        "local.log_every": 1,
        **(more or {}),
    }
    return load(None, [f"{key}={value}" for key, value in settings.items()], {})


def run(
    folder: Path,
    text: Path,
    *,
    stop_at: int | None = None,
    fresh: bool = False,
    scope: str = "shared",
    more: Mapping[str, object] | None = None,
) -> list[Event]:
    """The events of one peer's part; it is stopped after the step `stop_at`."""
    seen: list[Seen] = []

    def sink(wall_time_s: float, source: str, event: Event) -> None:
        seen.append(Seen(wall_time_s, source, event))
        if isinstance(event, TrainingStep) and event.step == stop_at:
            raise StoppedError

    with CoordinatorThread(
        folder / "journal", run_settings=None, save_rounds=SAVED_AT, timeouts=QUICK
    ) as coordinator:
        try:
            config = config_of(folder, text, coordinator.address, scope, more)
            run_peer(config, token=TOKEN, sinks=[sink], fresh=fresh)
        except StoppedError:
            assert stop_at is not None
    return [each.event for each in seen]


def digests(events: list[Event]) -> dict[int, str]:
    return {event.version: event.digest for event in events if isinstance(event, RoundApplied)}


def losses(events: list[Event]) -> dict[int, float]:
    return {event.step: event.loss for event in events if isinstance(event, TrainingStep)}


@pytest.mark.parametrize(
    ("scope", "more"),
    [
        ("shared", {}),
        ("own", {}),
        ("shared", {"inner.optimizer": "muon"}),
        ("shared", {"local.param_dtype": "bf16"}),
    ],
    ids=["shared", "own", "muon", "bf16"],
)
def test_a_trainer_that_was_stopped_goes_on_to_the_same_bits(
    tmp_path: Path, text: Path, scope: str, more: Mapping[str, object]
) -> None:
    whole = run(tmp_path / "whole", text, scope=scope, more=more)
    stopped = run(tmp_path / "stopped", text, stop_at=SAVED_AT * INNER_STEPS + 2, scope=scope, more=more)
    resumed = run(tmp_path / "stopped", text, scope=scope, more=more)
    assert digests(stopped) == {v: d for v, d in digests(whole).items() if v <= SAVED_AT}
    assert digests(resumed) == {v: d for v, d in digests(whole).items() if v > SAVED_AT}
    assert losses(resumed) == {s: loss for s, loss in losses(whole).items() if s > SAVED_AT * INNER_STEPS}
    (told,) = [event for event in resumed if isinstance(event, Resumed)]
    assert (told.version, told.own_part, told.remarks) == (SAVED_AT, True, ())
    (counted,) = [event for event in whole if isinstance(event, CheckpointsCounted)]
    assert (counted.saved, counted.newest) == (2, ROUNDS), "what was named, and the last version"
    if more:
        assert digests(whole) != digests(run(tmp_path / "plain", text, scope=scope)), (
            "the setting does something"
        )
    final = load_file(tmp_path / "whole" / "run" / "model.safetensors")
    assert {each.dtype for each in final.values()} == {torch.float32}, "masters, where there are such"


def test_fresh_refuses_to_overwrite_without_force(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, text, stop_at=SAVED_AT * INNER_STEPS + 1)
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN.decode())
    run_toml = tmp_path / "run.toml"
    run_toml.write_text(f'[run]\nname = "run"\n[local]\nout = "{tmp_path}"\npeer = "a"\n')
    with pytest.raises(ConfigError, match=f"the newest of version {SAVED_AT}; add --force"):
        train(run_toml, fresh=True)
