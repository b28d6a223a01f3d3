"""The ranks of a peer hold the same model, or all of them say which parameter differs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll.diloco.opening import Opening
from atoll.errors import ConfigError
from atoll.state.tensors import ModelTensors
from support.thread_crew import ThreadCrew, together


def compared(of_rank: list[dict[str, torch.nn.Parameter]]) -> list[Any]:
    def work(crew: ThreadCrew) -> None:
        opening: Any = SimpleNamespace(crew=crew, peer="bern")
        Opening._compare_ranks(opening, ModelTensors(of_rank[crew.rank].items()))

    return together(len(of_rank), work)


def parameter(*shape: int, frozen: bool = False) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape), requires_grad=not frozen)


def test_the_same_model_is_none_of_our_business() -> None:
    assert compared([{"w": parameter(2, 3)} for _ in range(3)]) == [None] * 3


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"w": parameter(2, 4)}, "rank 1 has parameter w as float32[2, 4]"),
        ({"v": parameter(2, 3)}, "rank 1 lacks parameter w"),
        ({"w": parameter(2, 3), "x": parameter(1)}, "rank 1 has parameter x as float32[1]"),
        ({"w": parameter(2, 3), "f": parameter(1, frozen=True)}, "they freeze or shard other parameters"),
    ],
)
def test_another_one_is_named_on_all_ranks(other: dict[str, torch.nn.Parameter], why: str) -> None:
    found = compared([{"w": parameter(2, 3)}, other])
    assert [type(each) for each in found] == [ConfigError] * 2
    assert found[0].args == found[1].args
    assert f"the ranks of bern hold different models: {why}" in str(found[0])
