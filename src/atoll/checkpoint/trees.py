"""State dictionaries as JSON and bytes: what optimizers, scalers and generators hand out, without a pickle.

A tree is dicts, lists and tuples of plain values, tensors and arrays. `take_apart` gives JSON and a list of leaves,
each a name and the memory that it lies in; nothing is copied. `put_together` gives the same tree back, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import torch

from atoll.errors import LocalError

Leaf = tuple[str, torch.Tensor]

_TAGS: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def take_apart(tree: Any, name: str, leaves: list[Leaf]) -> Any:
    """The JSON of a tree; its tensors and arrays are appended to `leaves`. Raises LocalError, naming what it is, for
    anything that JSON and tensors cannot say."""
    match tree:
        case None | bool() | int() | str():
            return tree
        case float():
            return tree if math.isfinite(tree) else {"float": repr(tree)}
        case torch.Tensor():
            leaves.append((name, _kept(tree)))
            return {"tensor": name, "device": str(tree.device)}
        case np.ndarray():
            flat = torch.from_numpy(np.ascontiguousarray(tree).reshape(-1).view(np.uint8))
            leaves.append((name, flat))
            return {"array": name, "dtype": tree.dtype.str, "shape": list(tree.shape)}
        case np.generic():
            return take_apart(tree.item(), name, leaves)
        case tuple():
            return {"tuple": [take_apart(each, f"{name}.{i}", leaves) for i, each in enumerate(tree)]}
        case list():
            return [take_apart(each, f"{name}.{i}", leaves) for i, each in enumerate(tree)]
        case Mapping() if all(isinstance(key, str | int) for key in tree):
            return {"dict": [[key, take_apart(each, f"{name}.{key}", leaves)] for key, each in tree.items()]}
    raise LocalError(
        f"{name} is a {type(tree).__name__}, which a checkpoint cannot hold: only numbers, text, tensors, and "
        "dicts, lists and tuples of them; leave it out of the state_dict"
    )


def put_together(said: Any, tensors: Mapping[str, torch.Tensor], device: str = "") -> Any:
    """What `take_apart` took apart, with tensors on `device` ("": where they were). Raises ValueError or KeyError if it
    is not that."""
    match said:
        case {"float": text}:
            return float(text)
        case {"tensor": name, "device": was_on}:
            return tensors[name].to(device or was_on)
        case {"array": name, "dtype": dtype, "shape": shape}:
            return tensors[name].numpy().view(np.dtype(dtype)).reshape(shape).copy()
        case {"tuple": list() as items}:
            return tuple(put_together(each, tensors, device) for each in items)
        case {"dict": list() as items}:
            return {key: put_together(each, tensors, device) for key, each in items}
        case dict():
            raise ValueError(f"unknown form {sorted(said)}")
        case list():
            return [put_together(each, tensors, device) for each in said]
    return said


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """What a safetensors header says of a leaf, apart from where it lies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def entries_of(leaves: Sequence[Leaf]) -> list[Entry]:
    return [Entry(name, _TAGS[each.dtype], tuple(each.shape), each.nbytes) for name, each in leaves]


def bytes_of(leaves: Sequence[Leaf]) -> list[memoryview]:
    """Each leaf's own memory."""
    return [tensor.reshape(-1).view(torch.uint8).numpy().data for _, tensor in leaves]


def safetensors_header(entries: Sequence[Entry]) -> memoryview:
    """What a safetensors file begins with whose tensors follow each other in this order."""
    said: dict[str, Any] = {}
    at = 0
    for each in entries:
        said[each.name] = {
            "dtype": each.dtype,
            "shape": list(each.shape),
            "data_offsets": [at, at + each.nbytes],
        }
        at += each.nbytes
    text = msgspec.json.encode(said)
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def safetensors_parts(leaves: Sequence[Leaf]) -> list[memoryview]:
    """The bytes of a safetensors file with these tensors: its header, then each tensor's own memory."""
    return [safetensors_header(entries_of(leaves)), *bytes_of(leaves)]


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in _TAGS:
        raise LocalError(
            f"a checkpoint cannot hold a tensor of {tensor.dtype}; leave it out of the state_dict"
        )
    return tensor.detach().to("cpu").contiguous()
