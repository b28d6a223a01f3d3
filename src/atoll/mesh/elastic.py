"""`ElasticDeviceMesh`: a fixed mesh inside a peer, and the set of peers outside, which changes while the run goes on.

The inner mesh is an ordinary `torch.distributed` DeviceMesh: FSDP2's `fully_shard`, DTensor and the like take it as it
is. The outer set is no process group: peers come, go and freeze, and nothing that is collective could survive that.
It is a value, replaced as a whole at safe points and nowhere else, so that a training loop never sees it change
between two of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from atoll.config.environment import rank_environment
from atoll.errors import LocalError
from atoll.mesh.group import LOOPBACK, MEET_S, RankGroup, open_group
from atoll.values import LinkRate

RANKS = "ranks"
"""The name of the inner mesh's one dimension."""


@dataclass(frozen=True, slots=True)
class PeerSet:
    """The peers of the run as of the last safe point.

    `ids` are the members, sorted; `version` is the run's newest that this peer holds. `weights` are those of the last
    committed round's contributors (integers, by peer); `rates` what this peer's links were seen to carry in it.
    """

    ids: tuple[str, ...] = ()
    version: int = 0
    weights: dict[str, int] = field(default_factory=dict)
    rates: tuple[LinkRate, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, peer: str) -> bool:
        return peer in self.ids


class ElasticDeviceMesh:
    """Both worlds of one rank. `peers` is the outer set, `local` the mesh of this peer's ranks."""

    def __init__(self, device_type: str = "cpu", group: RankGroup | None = None) -> None:
        """`device_type` as torch spells it ("cpu", "cuda"); `group` is that of this peer's ranks, if it was opened
        (`mesh.group`), and ends with the mesh. Makes nothing yet."""
        self._device_type = device_type
        self._group = group
        self._local: DeviceMesh | None = None
        self._own_group = False
        self._peers = PeerSet()

    @property
    def peers(self) -> PeerSet:
        """The outer set; the same value until the next safe point."""
        return self._peers

    @property
    def local(self) -> DeviceMesh:
        """A one-dimensional mesh (`ranks`) over this peer's ranks, fixed for the life of the process.

        Made at the first use, over the process group that is there: the program's own, or that of the ranks which a
        launcher started (`mesh.group`). Without either this peer has one rank: a group of it alone is made, which no
        other machine can reach. Raises LocalError if the ranks form no mesh.
        """
        if self._local is None:
            if not dist.is_initialized() and (env := rank_environment()).num_ranks > 1:
                self._group = open_group(env, self._device_type, MEET_S)
            if not dist.is_initialized():
                self._make_group()
            try:
                self._local = init_device_mesh(
                    self._device_type, (dist.get_world_size(),), mesh_dim_names=(RANKS,)
                )
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[0]
                raise LocalError(
                    f"this peer's {dist.get_world_size()} ranks form no mesh on {self._device_type}: {reason}"
                ) from error
        return self._local

    @property
    def device_type(self) -> str:
        """As torch spells it."""
        return self._device_type

    @property
    def num_ranks(self) -> int:
        """Ranks of this peer. Makes nothing."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def replace_peers(self, peers: PeerSet) -> None:
        """For the session, at a safe point."""
        self._peers = peers

    def _make_group(self) -> None:
        backend, options = "nccl", None
        if self._device_type == "cpu":
            # gloo listens, if only for itself: by default on the address that the host's name has
            backend, options = "gloo", dist.ProcessGroupGloo._Options()  # type: ignore[missing-attribute]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, pg_options=options)
        self._own_group = True

    def close(self, *, lost: bool = False) -> None:
        """End the group, if it was made here or given. Idempotent. `lost`: a sibling is; nothing is waited for."""
        self._local = None
        if self._group is not None:
            self._group.close(lost=lost)
        if self._own_group and dist.is_initialized():
            dist.destroy_process_group()
        self._own_group = False

    def __repr__(self) -> str:
        names = ", ".join(self._peers.ids) or "nobody yet"
        return f"ElasticDeviceMesh({self.num_ranks} x {self._device_type}; version {self._peers.version}: {names})"
