"""A peer's inner optimizer state as bytes, and back: for a joiner that begins with a copy of a donor's.

The format is safetensors: a tensor `KEY/PARAMETER` for each one of the state, plain numbers and the optimizer's class
in the header's metadata. Nothing is pickled. Parameters are matched by name, so the order of groups does not matter.
Only peers of one rank give and take it; theirs may be DTensors all the same, over a mesh of one.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from atoll.state.own_rows import laid_out, local_of
from atoll.state.tensors import ModelTensors

FORMAT: Final = "atoll inner 1"


class InnerState:
    """The state of one optimizer over one model. All calls are on the training thread."""

    def __init__(self, optimizer: torch.optim.Optimizer, tensors: ModelTensors) -> None:
        self._optimizer = optimizer
        names = {id(t): p.name for t, p in zip(tensors.tensors, tensors.layout.parameters, strict=True)}
        self._parameters = {
            p.name: t for t, p in zip(tensors.tensors, tensors.layout.parameters, strict=True)
        }
        # state_dict() numbers parameters in the order of the groups
        flat = [each for group in optimizer.param_groups for each in group["params"]]
        self._names = [names.get(id(each), "") for each in flat]

    def pack(self) -> bytes:
        """The state as it is; b"" if there is none yet, or none that can be written down."""
        found: dict[str, torch.Tensor] = {}
        numbers: dict[str, float | bool] = {}
        for index, values in self._optimizer.state_dict()["state"].items():
            for key, value in values.items() if self._names[index] else ():
                name = f"{key}/{self._names[index]}"
                if isinstance(value, torch.Tensor):
                    found[name] = local_of(value).to("cpu").contiguous()
                elif isinstance(value, bool | int | float):
                    numbers[name] = value
                elif value is not None:
                    return b""
        if not found and not numbers:
            return b""
        kind = type(self._optimizer).__name__
        about = {"format": FORMAT, "optimizer": kind, "numbers": msgspec.json.encode(numbers).decode()}
        return save(found, metadata=about)

    def take(self, data: bytes) -> None:
        """Put another peer's state in place of this one's. Raises ValueError, with nothing changed, if it does not
        fit. What the other one never trained stays as it is here: without a state."""
        values = self._read(data)
        state: dict[int, dict[str, Any]] = {}
        for index, name in enumerate(self._names):
            if name in values:
                state[index] = values.pop(name)
        if values:
            raise ValueError(
                f"it has a state for {min(values)!r}, which this peer's optimizer does not train"
            )
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _read(self, data: bytes) -> dict[str, dict[str, Any]]:
        """By parameter, then by key."""
        try:
            tensors, about = load(data), _metadata(data)
            numbers = msgspec.json.decode(about.get("numbers", "{}"), type=dict[str, bool | int | float])
        except (SafetensorError, msgspec.MsgspecError) as error:
            raise ValueError(f"it is no inner state ({error})") from None
        kind = type(self._optimizer).__name__
        if about.get("format") != FORMAT or about.get("optimizer") != kind:
            raise ValueError(
                f"it is that of {about.get('optimizer', 'something else')}, this peer has {kind}"
            )
        found: dict[str, dict[str, Any]] = {}
        for path, value in (*tensors.items(), *numbers.items()):
            key, _, name = path.partition("/")
            if name not in self._names or not name:
                raise ValueError(f"it has a state for {name!r}, which this peer's optimizer does not train")
            parameter = self._parameters[name]
            shape, own = tuple(getattr(value, "shape", ())), tuple(local_of(parameter).shape)
            if shape not in ((), own):
                raise ValueError(f"its {key} of {name!r} has shape {shape}, the parameter {own}")
            found.setdefault(name, {})[key] = (
                laid_out(value, parameter) if isinstance(value, torch.Tensor) and shape else value
            )
        return found


def _metadata(data: bytes) -> dict[str, str]:
    """What a safetensors header says besides its tensors: `load` drops it."""
    length = int.from_bytes(data[:8], "little")
    return msgspec.json.decode(data[8 : 8 + length], type=_Header).metadata


class _Header(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)
