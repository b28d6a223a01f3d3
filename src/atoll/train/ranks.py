"""What training needs to know of a peer's ranks: which of them this is, and how to take a mean over all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def _alone(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank `rank` of a peer with `count` of them; as it is made, the only one."""

    rank: int = 0
    count: int = 1
    mean: Callable[[Tensor], Tensor] = _alone
    """The mean of a tensor over the ranks, the same bits on each. Blocks: all ranks call it, with one shape."""

    @staticmethod
    def of(mesh: DeviceMesh) -> Ranks:
        """Those of a mesh with one dimension."""
        count = mesh.size()
        if count == 1:
            return Ranks()
        group = mesh.get_group()

        def mean(values: Tensor) -> Tensor:
            total = values.contiguous().clone()  # some gloo took strided tensors for what they are not
            dist.all_reduce(total, group=group)
            return total / count

        return Ranks(mesh.get_local_rank(), count, mean)

    def own_rows(self, batch: Tensor) -> Tensor:
        """This rank's share of a batch whose rows the ranks divide evenly."""
        if self.count == 1:
            return batch
        each, left = divmod(len(batch), self.count)
        if left:
            raise ValueError(f"{self.count} ranks do not divide a batch of {len(batch)} sequences")
        return batch[self.rank * each : (self.rank + 1) * each]


ALONE: Final = Ranks()
"""The one rank of a peer that has no others."""
