"""What training asks of a model, so that a user's own can take the place of the built-in Llama."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor, nn


class LanguageModel(Protocol):
    """A `torch.nn.Module` with a `loss`."""

    def loss(self, input_ids: Tensor, targets: Tensor, /) -> Tensor:
        """Mean nats per token over all of `targets` [B, T], a scalar with a gradient."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def train(self, mode: bool = True) -> object: ...
