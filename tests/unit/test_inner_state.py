"""A donor's inner optimizer state: written without pickle, read back to the bit, refused whole if it does not fit."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from torch import nn

from atoll.state.inner_state import InnerState
from atoll.state.tensors import ModelTensors
from atoll.train.adamw import make_adamw


def model(width: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.Linear(width, 2))


def trained(made: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> InnerState:
    for step in range(steps):
        optimizer.zero_grad()
        made(torch.full((2, 4), float(step + 1))).square().sum().backward()
        optimizer.step()
    return InnerState(optimizer, ModelTensors(made.named_parameters(remove_duplicate=False)))


def adamw(made: nn.Module) -> torch.optim.AdamW:
    return make_adamw(made, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)


def by_name(made: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    return {name: dict(optimizer.state[parameter]) for name, parameter in made.named_parameters()}


@pytest.mark.parametrize(
    "make",
    [
        adamw,
        lambda made: torch.optim.AdamW(reversed(list(made.parameters())), lr=0.3),
        lambda made: torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9),
    ],
    ids=["ours", "reversed", "sgd"],
)
def test_what_is_packed_is_taken_to_the_bit(make) -> None:  # type: ignore[no-untyped-def]
    ours, theirs = model(), model()
    donor, joiner = make(ours), make(theirs)
    data = trained(ours, donor).pack()
    trained(theirs, joiner, 0).take(data)
    want, got = by_name(ours, donor), by_name(theirs, joiner)
    assert want.keys() == got.keys()
    for name, values in want.items():
        assert values.keys() == got[name].keys()
        assert all(torch.equal(values[key], got[name][key]) for key in values), name


def test_parameters_are_matched_by_name_whatever_the_groups() -> None:
    ours, theirs = model(), model()
    donor = torch.optim.AdamW(reversed(list(ours.parameters())), lr=0.3)
    joiner = adamw(theirs)
    trained(theirs, joiner, 0).take(trained(ours, donor).pack())
    for name, values in by_name(ours, donor).items():
        assert torch.equal(values["exp_avg"], by_name(theirs, joiner)[name]["exp_avg"])
    assert {group["lr"] for group in joiner.param_groups} == {0.1}, "the learning rate is the run's"


def test_the_bytes_are_plain_safetensors(tmp_path) -> None:  # type: ignore[no-untyped-def]
    made = model()
    (tmp_path / "inner.safetensors").write_bytes(trained(made, adamw(made)).pack())
    with safe_open(tmp_path / "inner.safetensors", framework="pt") as file:
        assert "exp_avg_sq/0.weight" in list(file.keys())
        assert file.metadata()["optimizer"] == "AdamW"


def test_an_optimizer_that_made_no_step_has_nothing_to_give() -> None:
    made = model()
    assert trained(made, adamw(made), 0).pack() == b""
    assert trained(made, torch.optim.SGD(made.parameters(), lr=0.1)).pack() == b""


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    made = model()
    joiner = adamw(made)
    inner = trained(made, joiner, 0)
    wider, other = model(5), model()
    for data, why in (
        (b"\x80\x04junk", "it is no inner state"),
        (trained(wider, adamw(wider)).pack(), "has shape"),
        (
            trained(other, torch.optim.Adagrad(other.parameters())).pack(),
            "it is that of Adagrad, this peer has AdamW",
        ),
    ):
        with pytest.raises(ValueError, match=why):
            inner.take(data)
        assert not joiner.state
    lone = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(ValueError, match="which this peer's optimizer does not train"):
        trained(lone, adamw(lone), 0).take(trained(other, adamw(other)).pack())
