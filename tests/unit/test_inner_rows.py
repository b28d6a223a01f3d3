"""The state of an optimizer over cut parameters: what ranks saved is taken by another number of them, row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from atoll.state.inner_rows import StateDict, own_state, take_state
from atoll.train.muon import make_muon
from support.gloo_ranks import on_ranks

SHAPES = {"layer": (7, 6), "wide": (1, 5), "odd": (4, 3), "vector": (5,), "replica": (6, 2), "plain": (3, 2)}
"""Three ranks have 3, 3 and 1 of `layer`'s rows, and 2, 2 and none of `odd`'s; one alone has all of `wide`."""
WHOLE = ("replica", "plain", "scale")
STEPS = 3
Make = Callable[[nn.Module], torch.optim.Optimizer]


def model(mesh: DeviceMesh | None) -> nn.Module:
    """On the ranks of `mesh`: most is cut, some is whole on each as a replica or as a plain tensor."""
    made = nn.Module()
    generator = torch.Generator().manual_seed(3)
    for name, shape in SHAPES.items():
        values = torch.randn(shape, generator=generator)
        if mesh is not None and name != "plain":
            way = Replicate() if name in WHOLE else Shard(0)
            values = distribute_tensor(values, mesh, [way], src_data_rank=None)
        made.register_parameter(name, nn.Parameter(values))
    made.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
    return made


def adamw(made: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(made.parameters(), lr=0.1, betas=(0.9, 0.99))


def muon(made: nn.Module) -> torch.optim.Optimizer:
    return make_muon(made, lr=0.1, muon_lr=0.02, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)


def step(made: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """With the same gradients whatever the cut."""
    generator = torch.Generator().manual_seed(number)
    for parameter in made.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(
                gradient, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        parameter.grad = gradient
    optimizer.step()


def trained(make: Make, mesh: DeviceMesh | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    made = model(mesh)
    optimizer = make(made)
    for number in range(STEPS):
        step(made, optimizer, number)
    return made, optimizer


def whole(made: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and state by name, of all ranks."""
    found = dict(made.named_parameters())
    for name, parameter in made.named_parameters():
        found |= {f"{name}/{key}": each for key, each in optimizer.state[parameter].items()}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def check_saved(rank: int, num_ranks: int, folder: str, kind: str) -> Any:
    """Each rank saves; what it saved is its own rows, plain tensors."""
    made, optimizer = trained(MAKES[kind], init_device_mesh("cpu", (num_ranks,)))
    saved = own_state(optimizer)
    plain = [each for state in saved["state"].values() for each in state.values()]
    assert not any(isinstance(each, DTensor) for each in plain)
    torch.save(saved, f"{folder}/{num_ranks}.{rank}")
    alone, same = trained(MAKES[kind], None)
    if kind == "adamw":  # orthogonalized is the same here too, but not to the bit on every processor
        equal(whole(made, optimizer), whole(alone, same))
    numel = sum(p.to_local().numel() for p in made.parameters() if isinstance(p, DTensor))
    return {"numel": numel, "state": sum(each.numel() for each in plain)}


def check_taken(rank: int, num_ranks: int, folder: str, saved_by: int, kind: str) -> Any:
    """What `saved_by` ranks saved becomes the state that this many have after the same steps; and it goes on."""
    mesh = init_device_mesh("cpu", (num_ranks,)) if num_ranks > 1 else None
    made, optimizer = trained(MAKES[kind], mesh)
    fresh = model(mesh)
    joiner = MAKES[kind](fresh)
    with torch.no_grad():
        for ours, theirs in zip(fresh.parameters(), made.parameters(), strict=True):
            ours.copy_(theirs)
    take_state(joiner, saved_states(folder, saved_by), rank)
    for ours, theirs in zip(fresh.parameters(), made.parameters(), strict=True):
        for key, each in joiner.state[ours].items():
            assert type(each) is type(optimizer.state[theirs][key]), key
    close(whole(fresh, joiner), whole(made, optimizer), exact=kind == "adamw")
    step(made, optimizer, STEPS)
    step(fresh, joiner, STEPS)
    close(whole(fresh, joiner), whole(made, optimizer), exact=kind == "adamw")
    return True


def saved_states(folder: str, saved_by: int) -> list[StateDict]:
    return [torch.load(f"{folder}/{saved_by}.{each}", weights_only=True) for each in range(saved_by)]


def close(found: dict[str, Tensor], wanted: dict[str, Tensor], *, exact: bool) -> None:
    if exact:
        equal(found, wanted)
    else:
        torch.testing.assert_close(found, wanted)


MAKES: dict[str, Make] = {"adamw": adamw, "muon": muon}


@pytest.mark.parametrize("kind", list(MAKES))
def test_states_of_three_ranks_are_taken_by_two_and_by_one(tmp_path: Any, kind: str) -> None:
    sizes = on_ranks(check_saved, 3, str(tmp_path), kind)
    assert len({size["numel"] for size in sizes}) > 1, "rows are shared unevenly"
    assert on_ranks(check_taken, 2, str(tmp_path), 3, kind) == [True, True]
    assert on_ranks(check_taken, 1, str(tmp_path), 3, kind) == [True]
    on_ranks(check_saved, 1, str(tmp_path), kind)
    assert on_ranks(check_taken, 2, str(tmp_path), 1, kind) == [True, True]


def check_own(rank: int, num_ranks: int) -> Any:
    """A rank takes back its own, and refuses what does not fit, with nothing changed."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    made, optimizer = trained(adamw, mesh)
    fresh = model(mesh)
    joiner = adamw(fresh)
    with torch.no_grad():
        for ours, theirs in zip(fresh.parameters(), made.parameters(), strict=True):
            ours.copy_(theirs)
    take_state(joiner, [own_state(optimizer)], rank)
    equal(whole(fresh, joiner), whole(made, optimizer))

    before = {name: each.clone() for name, each in whole(made, optimizer).items()}
    said = {}
    for name, spoil in SPOILT.items():
        saved = [own_state(optimizer) for _ in range(3)]
        try:
            take_state(optimizer, spoil(saved), rank)
            said[name] = "taken"
        except ValueError as error:
            said[name] = str(error)
        equal(whole(made, optimizer), before)
    return said


def _less(saved: list[StateDict]) -> list[StateDict]:
    """The second rank had no state of the first parameter."""
    del saved[1]["state"][0]
    return saved


def _more(saved: list[StateDict]) -> list[StateDict]:
    saved[0]["state"][99] = saved[0]["state"][0]
    return saved[:1]


def _groups(saved: list[StateDict]) -> list[StateDict]:
    return [{**saved[0], "param_groups": []}]


SPOILT: dict[str, Callable[[list[StateDict]], list[StateDict]]] = {
    "rows": lambda saved: saved,  # of two ranks, three times
    "own": lambda saved: [{**saved[0], "state": {0: {"exp_avg": torch.zeros(2, 2)}}}],
    "less": _less,
    "more": _more,
    "groups": _groups,
}


def test_a_misfit_is_refused_and_changes_nothing() -> None:
    for said in on_ranks(check_own, 2):
        assert "has shape" in said["rows"]
        assert "the parameter" in said["rows"]
        assert said["own"] == "exp_avg of parameter 0 has shape (2, 2), the parameter (7, 6)"
        assert "was not saved by every rank" in said["less"]
        assert said["more"] == "it has a state for parameter 99 of 7"
        assert "different number of parameter groups" in said["groups"]
