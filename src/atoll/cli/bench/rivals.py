"""What else one could use for the same all-reduce. Imported only when asked for.

A rival gets the same fp32 values and gives their fp32 mean. What it need not pay for is not timed: values are loaded
before, and gloo's division of the sum by the world comes after.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import numpy as np

from atoll.errors import ConfigError
from atoll.kernels import Floats

TIMEOUT = timedelta(seconds=600)


class RivalGroup(Protocol):
    """One member's end. Made with `rendezvous` "" by the first member, with the first one's by the others."""

    rendezvous: str

    def load(self, values: Floats) -> None: ...
    def all_reduce(self) -> None:
        """What is timed."""
        ...

    def mean(self) -> Floats: ...
    def close(self) -> None: ...


class Gloo:
    """torch.distributed over gloo, fp32, in place: what PyTorch does without NCCL."""

    def __init__(self, index: int, world: int, host: str, rendezvous: str) -> None:
        import torch
        import torch.distributed as distributed

        self._torch, self._distributed, self._world = torch, distributed, world
        first = index == 0
        store = distributed.TCPStore(
            host if first else rendezvous.rpartition(":")[0],
            0 if first else int(rendezvous.rpartition(":")[2]),
            world_size=world,
            is_master=first,
            timeout=TIMEOUT,
            wait_for_workers=False,
        )
        self.rendezvous = f"{host}:{store.port}" if first else rendezvous
        self._join = lambda: distributed.init_process_group(
            "gloo", store=store, rank=index, world_size=world, timeout=TIMEOUT
        )
        self._joined = False
        self._tensor = torch.empty(0)

    def load(self, values: Floats) -> None:
        if not self._joined:  # it waits for all members, so not in the constructor, where the first is alone
            self._join()
            self._joined = True
        if len(self._tensor) != len(values):
            self._tensor = self._torch.empty(len(values))
        self._tensor.numpy()[:] = values
        self._distributed.barrier()

    def all_reduce(self) -> None:
        self._distributed.all_reduce(self._tensor)

    def mean(self) -> Floats:
        return (self._tensor.numpy() / np.float32(self._world)).astype(np.float32, copy=False)

    def close(self) -> None:
        if self._joined:
            self._distributed.destroy_process_group()


class Hivemind:
    """hivemind's averager with its blockwise 8-bit codec: what OpenDiLoCo uses. Matchmaking is timed: it is needed."""

    def __init__(self, index: int, world: int, host: str, rendezvous: str) -> None:
        hivemind: Any = importlib.import_module("hivemind")
        compression: Any = importlib.import_module("hivemind.compression")
        self._torch: Any = importlib.import_module("torch")
        self._make: Callable[[Any], Any] = lambda tensors: hivemind.averaging.DecentralizedAverager(
            tensors,
            self._dht,
            prefix="bench",
            start=True,
            target_group_size=world,
            min_matchmaking_time=1.0,
            request_timeout=0.5,
            compression=compression.BlockwiseQuantization(),
        )
        peers = [rendezvous] if rendezvous else None
        self._dht = hivemind.DHT(initial_peers=peers, start=True, host_maddrs=[f"/ip4/{host}/tcp/0"])
        self.rendezvous = rendezvous or str(self._dht.get_visible_maddrs()[0])
        self._averager: Any = None

    def load(self, values: Floats) -> None:
        if self._averager is None:
            self._averager = self._make([self._torch.from_numpy(values.copy())])
        with self._averager.get_tensors() as (tensor,):
            if len(tensor) != len(values):
                raise ConfigError("hivemind is compared at one --numel at a time")
            tensor.numpy()[:] = values

    def all_reduce(self) -> None:
        if self._averager.step(wait=True, timeout=TIMEOUT.total_seconds()) is None:
            raise RuntimeError("hivemind found no group")

    def mean(self) -> Floats:
        with self._averager.get_tensors() as (tensor,):
            return tensor.numpy().copy()

    def close(self) -> None:
        if self._averager is not None:
            self._averager.shutdown()
        self._dht.shutdown()


RIVALS: dict[str, Callable[[int, int, str, str], RivalGroup]] = {"gloo": Gloo, "hivemind": Hivemind}
_NEEDS = {
    "gloo": ("torch", "pip install torch"),
    "hivemind": ("hivemind", 'pip install hivemind "numpy<2.4"'),
}


def check_rivals(names: list[str]) -> None:
    """ConfigError for one that is unknown or not installed."""
    for name in names:
        if name not in RIVALS:
            raise ConfigError(f"--compare {name}: unknown; there are: {', '.join(RIVALS)}")
        module, install = _NEEDS[name]
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"--compare {name}: {module} is not installed; {install}")
