"""Muon for hidden matrices, AdamW for everything else, as one optimizer.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; as DiLoCo's inner optimizer: MuLoCo,
arXiv:2505.23725) keeps one momentum per matrix and steps along it *orthogonalized*: all singular values brought near
one by five Newton-Schulz iterations with a quintic polynomial. So it needs half the state that AdamW has. With B the
momentum, g the gradient, W a matrix of m rows and n columns, and lr Muon's own rate:

    B <- B + 0.05 (g - B)                         u = g + 0.95 (B - g)                        (Nesterov)
    W <- (1 - lr weight_decay) W - lr sqrt(max(1, m / n)) orthogonalized(u)

Embeddings, the output head, vectors and what has three dimensions or more are AdamW's (`train.adamw`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from atoll.train.adamw import decay_groups, make_adamw

MOMENTUM: Final = 0.95
NEWTON_SCHULZ_STEPS: Final = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Chosen by Jordan for a steep slope at zero: singular values end between about 0.7 and 1.2, which is near enough."""
_EPS = 1e-7
HEADS: Final = ("lm_head", "embed_out", "output_head")
"""What modules that give logits are called, where a model does not say (`get_output_embeddings`)."""


class Muon(torch.optim.Optimizer):
    """The groups with a "muon_ratio" are Muon's: their rate is `lr` x that ratio, so that one schedule sets every
    group's `lr`. The others are those of an AdamW, which shares groups and state with this object."""

    def __init__(
        self, matrices: list[nn.Parameter], adamw: torch.optim.AdamW | None, **numbers: float
    ) -> None:
        """`numbers`: lr, muon_ratio and weight_decay of `matrices`. `adamw` None: there is nothing else."""
        self._adamw = adamw
        groups: list[dict[str, Any]] = [{"params": matrices, **numbers}] if matrices else []
        super().__init__([*groups, *(adamw.param_groups if adamw else [])], {"lr": numbers["lr"]})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._share()

    def _share(self) -> None:
        """Both have the same groups and the same state, also after one was put in place of another."""
        if self._adamw is None:
            return
        self._adamw.param_groups = [each for each in self.param_groups if "muon_ratio" not in each]
        self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        for group in self.param_groups:
            if "muon_ratio" in group:
                for matrix in group["params"]:
                    if matrix.grad is not None:
                        self._step_one(matrix, matrix.grad, group)
        if self._adamw is not None:
            self._adamw.step()
        return value

    def _step_one(self, matrix: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
        direction = orthogonalized(gradient.lerp(momentum, MOMENTUM)).to(matrix.dtype)
        lr = group["lr"] * group["muon_ratio"]
        matrix.mul_(1 - lr * group["weight_decay"])
        matrix.add_(direction, alpha=-lr * math.sqrt(max(1.0, matrix.size(0) / matrix.size(1))))


def orthogonalized(matrix: Tensor) -> Tensor:
    """U S V with singular values S near one, for a `matrix` of U D V; in bf16, as its products are.

    It needs the whole matrix: a DTensor is gathered, each rank computes all of it, and keeps its own rows.
    """
    if not isinstance(matrix, DTensor):
        return _newton_schulz(matrix)
    mesh = matrix.device_mesh
    whole = _newton_schulz(matrix.full_tensor())
    replicas = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicas.redistribute(mesh, matrix.placements)


def _newton_schulz(matrix: Tensor) -> Tensor:
    wide = matrix.bfloat16()
    if matrix.size(0) > matrix.size(1):
        wide = wide.T
    wide = wide / wide.norm().clamp(min=_EPS)  # no singular value is above the Frobenius norm
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), wide, beta=_A)
    return wide.T if matrix.size(0) > matrix.size(1) else wide


def make_muon(
    model: nn.Module,
    *,
    lr: float,
    muon_lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Muon over the hidden matrices of `model` that are trained, AdamW over its other trainable parameters.

    `muon_lr` is Muon's rate where AdamW's is `lr`.
    """
    matrices = hidden_matrices(model)
    adamw = None
    if len(matrices) < sum(each.requires_grad for each in model.parameters()):
        adamw = make_adamw(model, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, apart=matrices)
    return Muon(matrices, adamw, lr=lr, muon_ratio=muon_lr / lr, weight_decay=weight_decay)


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trainable matrices between embedding and output head, each once."""
    heads = {id(parameter) for head in _heads(model) for parameter in head.parameters()}
    return [each for each in decay_groups(model)[0] if each.ndim == 2 and id(each) not in heads]


def _heads(model: nn.Module) -> list[nn.Module]:
    ask: Any = getattr(model, "get_output_embeddings", None)
    said = ask() if ask is not None else None
    named = [module for name, module in model.named_modules() if name.rpartition(".")[2] in HEADS]
    return [*named, said] if said is not None else named
