"""Names to tensors: the one place that reads and writes a model's parameters as one flat fp32 vector.

Values move in logical order whatever the strides. Tied weights count once; parameters that overlap in any other way
are refused by name. Frozen parameters do not travel: they are part of what peers compare when they declare.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.errors import ConfigError
from atoll.state.layout import Layout
from atoll.values import ParameterInfo

Floats = NDArray[np.float32]
_COMPILED = "_orig_mod."


class ModelTensors:
    """The trainable parameters of one model, in the order of the layout. All calls are on the training thread."""

    def __init__(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """`named_parameters` as `model.named_parameters(remove_duplicate=False)` gives them: with every name of a tied
        weight, so that module order does not decide which one it goes by. Raises ConfigError for overlapping storage.
        """
        named = {name.replace(_COMPILED, ""): tensor for name, tensor in named_parameters}
        trainable = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
        trainable = _without_ties(trainable)
        infos = [
            ParameterInfo(
                name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch.")
            )
            for name, tensor in trainable.items()
        ]
        self.layout = Layout.of(infos)
        self.tensors = tuple(trainable[p.name] for p in self.layout.parameters)
        self.written: Callable[[], None] = lambda: None
        """Called after each `write`, by which time what follows from the weights may be made anew."""
        self._frozen = {name: tensor for name, tensor in named.items() if not tensor.requires_grad}
        if self.layout.numel == 0:
            raise ConfigError("the model has no trainable element: nothing could be synchronised")

    def read(self) -> Floats:
        """The local weights as a new fp32 vector of `layout.numel` elements."""
        flat = torch.empty(self.layout.numel, dtype=torch.float32)
        for tensor, piece in self._pieces(flat):
            piece.copy_(tensor.detach())
        return flat.numpy()

    def write(self, values: Floats) -> None:
        """Set the local weights (rounded to each parameter's dtype)."""
        with torch.no_grad():
            for tensor, piece in self._pieces(torch.from_numpy(values)):
                tensor.copy_(piece)
        self.written()

    def subtract_from(self, anchor: Floats, out: Floats) -> None:
        """out = anchor - local weights: the pseudo-gradient.

        Like minus like: the anchor is rounded to the parameter's dtype first, so that no inner step gives exactly 0
        also for bf16 weights (E24).
        """
        pairs = zip(self._pieces(torch.from_numpy(anchor)), self._pieces(torch.from_numpy(out)), strict=True)
        with torch.no_grad():
            for (tensor, start), (_, difference) in pairs:
                local = tensor.detach()
                if local.dtype == torch.float32 and local.device.type == "cpu":
                    torch.sub(start, local, out=difference)
                else:
                    like = start.to(device=local.device, dtype=local.dtype)
                    wide = torch.float64 if local.dtype == torch.float64 else torch.float32
                    difference.copy_(like.to(wide) - local.to(wide))

    def frozen_digest(self) -> str:
        """SHA-256 over names, shapes and bytes of the parameters that do not travel; "" if there are none."""
        if not self._frozen:
            return ""
        digest = hashlib.sha256()
        for name, tensor in sorted(self._frozen.items()):
            values = tensor.detach().to("cpu", torch.float32).contiguous()
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(values.numpy().tobytes())
        return digest.hexdigest()

    def _pieces(self, flat: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        for tensor, range_ in zip(self.tensors, self.layout.ranges, strict=True):
            yield tensor, flat[range_.start : range_.stop].view(tensor.shape)


def _without_ties(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keep the alphabetically first name of each storage; refuse storages that overlap in any other way."""
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(named.items()):
        twin = next((k for k, other in kept.items() if _same_view(tensor, other)), None)
        if twin is None:
            kept[name] = tensor
    spans = sorted((*_span(tensor), name) for name, tensor in kept.items() if tensor.numel())
    for (_, stop, first), (start, _, second) in itertools.pairwise(spans):
        if start < stop:
            raise ConfigError(
                f"parameters {first!r} and {second!r} share storage without being tied as a whole; "
                "give each its own storage, or use one parameter in both places"
            )
    return kept


def _same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b:
        return True
    return a.numel() > 0 and a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the byte after the last that the tensor touches."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
