"""Atoll: train one model on machines that are far apart.

Importing this package does no work: names are loaded on first use, so that protocol code never pays for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.diloco.joining import join as join
    from atoll.diloco.optimizer import DiLoCoOptimizer as DiLoCoOptimizer
    from atoll.diloco.session import Session as Session
    from atoll.mesh.elastic import ElasticDeviceMesh as ElasticDeviceMesh

__version__ = "0.1.0"

_PUBLIC = {
    "DiLoCoOptimizer": "atoll.diloco.optimizer",
    "Session": "atoll.diloco.session",
    "ElasticDeviceMesh": "atoll.mesh.elastic",
    "join": "atoll.diloco.joining",
}

__all__ = ["DiLoCoOptimizer", "ElasticDeviceMesh", "Session", "__version__", "join"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
