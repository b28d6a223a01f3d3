"""Trained adapters merged into the frozen weights that they were trained over: a plain model again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from atoll.checkpoint.description import Adapters
from atoll.errors import ConfigError

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def merged(
    adapters: Adapters, trained: Mapping[str, Tensor], base: Path, dtype: torch.dtype
) -> dict[str, Tensor]:
    """All tensors of the folder `base`, under its names, with W + scale B A for each adapted layer, in `dtype`.

    `trained` has the adapters in fp32. Raises ConfigError if `base` does not have the weights that were trained over.
    """
    tensors = _read(base)
    for layer, said in adapters.layers.items():
        name = _name_in(tensors, f"{layer}.weight", base)
        weight = tensors[name].to(torch.float32)
        if weight_digest(weight) != said.digest:
            raise ConfigError(
                f"{base}: {name} is not what the adapters were trained over; give --base with the folder that "
                "model.init_from or model.hf named"
            )
        change = adapters.scale * (trained[f"{layer}.lora_b"] @ trained[f"{layer}.lora_a"])
        tensors[name] = weight + (change.T if said.transposed else change)
    return {n: (t.to(dtype) if t.is_floating_point() else t).contiguous() for n, t in tensors.items()}


def weight_digest(weight: Tensor) -> str:
    """SHA-256 of a weight's values in fp32, wherever it lies. Blocks."""
    values = weight.detach().to("cpu", torch.float32).contiguous().numpy()
    return hashlib.sha256(values.tobytes()).hexdigest()


def _read(base: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    try:
        index = base / _INDEX
        names = {_WEIGHTS}
        if index.is_file():
            names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
        for name in sorted(names):
            with safe_open(base / Path(name).name, framework="pt") as file:
                stored = file.keys()  # it is no mapping: only this names its tensors
                tensors |= {each: file.get_tensor(each) for each in stored}
    except (OSError, SafetensorError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"the weights that the adapters were trained over cannot be read from {base}: {error}; give --base with "
            "where they are on this machine"
        ) from None
    return tensors


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _name_in(tensors: Mapping[str, Tensor], name: str, base: Path) -> str:
    """As the folder calls it: old files leave out the name of the outermost module."""
    if name in tensors:
        return name
    short = name.partition(".")[2]
    if short in tensors:
        return short
    raise ConfigError(
        f"{base} has no {name}; give --base with the folder that model.init_from or model.hf named"
    )
