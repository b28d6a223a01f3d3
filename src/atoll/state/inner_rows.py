"""The state of an optimizer over a model that is cut among ranks, as each rank saves it and takes it back.

What `torch.optim` calls a state dict, with the rows of this rank in the place of DTensors. States that other ranks
saved, also of a peer with another number of them, are put together and cut anew: rows follow each other by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from atoll.state.own_rows import laid_out, local_of

StateDict = dict[str, Any]


def own_state(optimizer: torch.optim.Optimizer) -> StateDict:
    """The optimizer's state dict, with its own rows of what is cut."""
    saved = optimizer.state_dict()
    return {**saved, "state": {index: _plain(each) for index, each in saved["state"].items()}}


def take_state(optimizer: torch.optim.Optimizer, saved: Sequence[StateDict], rank: int) -> None:
    """Give the optimizer what ranks saved (`own_state`), by rank; one alone is this rank's own, cut as it is now.

    Raises ValueError, with the optimizer unchanged, if that does not fit its parameters.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    first = saved[0]
    state: dict[int, dict[str, Any]] = {}
    for index in first["state"]:
        if index >= len(parameters):
            raise ValueError(f"it has a state for parameter {index} of {len(parameters)}")
        by_rank = [each["state"].get(index, {}) for each in saved]
        state[index] = {
            key: _value(
                parameters[index], f"{key} of parameter {index}", [each.get(key) for each in by_rank], rank
            )
            for key in first["state"][index]
        }
    optimizer.load_state_dict({**first, "state": state})


def _plain(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {key: local_of(each) if isinstance(each, DTensor) else each for key, each in values.items()}


def _value(parameter: Tensor, what: str, values: Sequence[Any], rank: int) -> Any:
    """One value of a parameter's state, as it is here, from those of the ranks that saved it."""
    own = values[0]
    if not isinstance(own, Tensor) or not own.ndim:
        return own
    cut = isinstance(parameter, DTensor) and isinstance(parameter.placements[0], Shard)
    here = local_of(parameter)
    if len(values) == 1 and own.shape == here.shape:
        return laid_out(own, parameter) if isinstance(parameter, DTensor) else own
    whole = own if own.shape == parameter.shape else _joined(what, values)
    if whole.shape != parameter.shape:
        raise ValueError(f"{what} has shape {tuple(whole.shape)}, the parameter {tuple(parameter.shape)}")
    if not isinstance(parameter, DTensor):
        return whole
    if not cut:
        return laid_out(whole, parameter)
    most = -(-len(whole) // parameter.device_mesh.size())
    return laid_out(whole[rank * most :][: len(here)], parameter)


def _joined(what: str, values: Sequence[Any]) -> Tensor:
    rows = [each for each in values if isinstance(each, Tensor)]
    if len(rows) != len(values):
        raise ValueError(f"{what} was not saved by every rank")
    return torch.cat(rows)
