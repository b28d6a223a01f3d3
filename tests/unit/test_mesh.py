"""The two worlds of a peer: an ordinary mesh inside, and a set of peers that changes only at safe points."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from atoll.mesh.elastic import RANKS, ElasticDeviceMesh, PeerSet

TWO_RANKS = """
import torch.distributed as dist
from atoll.mesh.elastic import ElasticDeviceMesh
dist.init_process_group("gloo")
mesh = ElasticDeviceMesh()
print("ranks", mesh.num_ranks, mesh.local.size(), mesh.local.get_local_rank() == dist.get_rank())
mesh.close()
assert dist.is_initialized(), "not ours to end"
dist.destroy_process_group()
"""


@pytest.fixture
def mesh() -> Iterator[ElasticDeviceMesh]:
    made = ElasticDeviceMesh()
    yield made
    made.close()


def test_one_rank_is_a_mesh_that_fsdp_takes_and_nobody_can_reach(mesh: ElasticDeviceMesh) -> None:
    model = torch.nn.Linear(4, 2)
    fully_shard(model, mesh=mesh.local)
    model(torch.ones(3, 4)).sum().backward()
    assert mesh.local.mesh_dim_names == (RANKS,)
    assert (mesh.local.size(), mesh.num_ranks) == (1, 1)
    listening = [each for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
    addresses = {each.laddr.ip for each in listening if each.type == socket.SOCK_STREAM}
    assert addresses <= {"127.0.0.1"}


def test_the_group_that_it_made_ends_with_it(mesh: ElasticDeviceMesh) -> None:
    assert not dist.is_initialized(), "nothing is made before it is needed"
    first = mesh.local
    assert mesh.local is first
    mesh.close()
    assert not dist.is_initialized()
    mesh.close()


@pytest.mark.slow  # torch's own start of two ranks fails now and then on a machine that is full
def test_ranks_of_torchrun_are_taken_as_they_are() -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "--no-python",
    ]
    command += [sys.executable, "-c", TWO_RANKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.stdout.split("\n").count("ranks 2 2 True") == 2, done.stdout + done.stderr


def test_the_set_of_peers_is_a_value(mesh: ElasticDeviceMesh) -> None:
    before = mesh.peers
    mesh.replace_peers(PeerSet(ids=("a", "b"), version=3, weights={"a": 1, "b": 2}))
    assert (len(before), before.version) == (0, 0), "who holds the old one sees no change"
    assert len(mesh.peers) == 2
    assert "b" in mesh.peers
    assert "c" not in mesh.peers
    assert repr(mesh) == "ElasticDeviceMesh(1 x cpu; version 3: a, b)"
