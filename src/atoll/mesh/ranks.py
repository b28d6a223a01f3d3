"""The ranks of this peer, as a launcher started them: their crew, and the mesh over which the model is cut."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from atoll.config.environment import rank_environment
from atoll.errors import ConfigError
from atoll.mesh.crew import Crew
from atoll.mesh.elastic import ElasticDeviceMesh
from atoll.mesh.group import MEET_S, open_group


def open_ranks(device_type: str) -> tuple[Crew, ElasticDeviceMesh]:
    """Meet the other ranks of this peer, if there are any; blocks at most about `MEET_S`. All ranks call it, once.

    Raises ConfigError if what the launcher said makes no sense, LocalError or SiblingLost if ranks do not come.
    """
    group = open_group(rank_environment(), device_type, MEET_S)
    return Crew.open(group, connect_s=MEET_S), ElasticDeviceMesh(device_type, group)


@contextmanager
def ranks_of_this_peer(device: str) -> Generator[tuple[Crew, ElasticDeviceMesh]]:
    """`open_ranks` for a command, which ends them: an error that ends this rank is told to the others. `device` is a
    device as torch spells it ("cuda:1")."""
    kind, _, index = device.partition(":")
    crew, mesh = open_ranks(kind)
    try:
        if index and crew.num_ranks > 1:
            raise ConfigError(
                f"local.device = {device!r} is one device, this peer has {crew.num_ranks} ranks; give {kind!r}: "
                "each takes its own"
            )
        yield crew, mesh
    except BaseException as error:
        crew.close(error)
        mesh.close(lost=True)  # nobody waits for ranks that are gone, or frozen
        raise
    crew.close()
    mesh.close()
