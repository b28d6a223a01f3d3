"""A peer's own part of a checkpoint: all that training reads next and that no other peer has.

Inner optimizer, generators of random numbers, what the codec still owes, data cursors, and whatever else is
registered (a gradient scaler, a scheduler). Weights are not in it: at a commit they are the anchor. A run that goes on
from a checkpoint gives the bits of one that never stopped, on a processor; leave out any part and it does not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from atoll.checkpoint.trees import Leaf, put_together, safetensors_parts, take_apart


class Stateful(Protocol):
    """What has a `state_dict`: optimizers, schedulers, scalers, samplers."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Taken:
    """An own part at one moment: `state` is JSON, `leaves` its tensors, which still lie where training will change
    them."""

    state: dict[str, Any]
    leaves: list[Leaf]

    @property
    def parts(self) -> list[memoryview]:
        """The bytes of its safetensors file."""
        return safetensors_parts(self.leaves)

    @property
    def size_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(slots=True)
class OwnPart:
    """By name, what to ask for its state and what to give it to. Used on the training thread."""

    holders: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = field(default_factory=dict)

    def hold(self, name: str, take: Callable[[], Any], give: Callable[[Any], Any]) -> None:
        self.holders[name] = (take, give)

    def hold_stateful(self, name: str, each: Stateful) -> None:
        self.hold(name, each.state_dict, each.load_state_dict)

    def take(self, prefix: str = "") -> Taken:
        """`prefix` is put before the names of leaves."""
        leaves: list[Leaf] = []
        state = {name: take_apart(take(), prefix + name, leaves) for name, (take, _) in self.holders.items()}
        return Taken(state, leaves)

    def give(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Hand out what was taken; the names that nobody here holds, or that the checkpoint lacks, are returned."""
        for name, (_, give) in self.holders.items():
            if name in state:
                give(put_together(state[name], tensors))
        return sorted(state.keys() ^ self.holders.keys())


def random_states() -> dict[str, Any]:
    """Of torch (all devices), numpy and Python: the global generators."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    if "mps" in states and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states["mps"])
