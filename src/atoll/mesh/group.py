"""The ranks of one peer find each other: a store that they meet in, and `torch.distributed`'s default process group.

A launcher (torchrun, or `atoll launch --ranks`) started them; what it said is `config.environment.RankEnvironment`.
The store is also where the ranks' other channels begin (`mesh.crew`).
"""

from __future__ import annotations

import ctypes
import ipaddress
import itertools
import socket
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from atoll.config.environment import RankEnvironment
from atoll.errors import ConfigError, LocalError

LOOPBACK = "127.0.0.1"
_meetings = itertools.count()
"""Of this process; its siblings count alike. What an earlier meeting left in the store is not taken for this one's."""
MEET_S = 120.0
"""How long a rank waits for its siblings to start: they import torch, and may build kernels."""
COLLECTIVE_S = 1800.0
"""How long a collective of the default group may take: torch's own default. Lost siblings are `mesh.watch`'s affair."""

_openings = itertools.count()
"""Of this process, over a group that the program made: all ranks do the same."""


@dataclass(slots=True)
class RankGroup:
    """The ranks of this peer, together. `store` is None if there is one rank: then nothing is made.

    `host` is the address that this rank listens on for its siblings.
    """

    rank: int = 0
    num_ranks: int = 1
    host: str = LOOPBACK
    store: dist.Store | None = None
    owned: bool = False
    """Whether the default process group was made here, and ends with this."""

    def close(self, *, lost: bool = False) -> None:
        """End the default process group, if it was made here. Idempotent. `lost`: a sibling is, so that the end of what
        is under way must not be waited for."""
        if lost and dist.is_initialized():
            abandon(dist.group.WORLD)
        elif self.owned and dist.is_initialized():
            dist.destroy_process_group()
        self.owned, self.store = False, None


def open_group(env: RankEnvironment, device_type: str, timeout_s: float) -> RankGroup:
    """Meet the other ranks and make the default process group: gloo for "cpu", nccl for "cuda".

    Once in a process, except for a group that a program made itself: that is taken as it is. Blocks at most about
    `timeout_s`. One rank alone makes nothing. Raises LocalError if not all ranks came, naming those that did not.
    """
    if dist.is_initialized():
        return _of_program(env)
    if env.num_ranks == 1:
        return RankGroup()
    store = meet(env, timeout_s)
    host = listening_host(env)
    if device_type == "cuda":
        _choose_device(env)
    try:
        dist.init_process_group(
            "gloo" if device_type == "cpu" else "nccl",
            store=dist.PrefixStore("default", store),
            rank=env.rank,
            world_size=env.num_ranks,
            timeout=timedelta(seconds=timeout_s),
            pg_options=gloo_options(host, timeout_s) if device_type == "cpu" else None,
        )
        distributed_c10d._set_pg_timeout(timedelta(seconds=COLLECTIVE_S))
    except RuntimeError as error:
        raise LocalError(
            f"rank {env.rank} of {env.num_ranks} cannot connect to its siblings for {timeout_s:g} s: "
            f"{first_line(error)}; see what the other ranks say, and start all again"
        ) from error
    return RankGroup(env.rank, env.num_ranks, host, store, owned=True)


def _choose_device(env: RankEnvironment) -> None:
    """Raises ConfigError if there is no device for this rank."""
    try:
        torch.cuda.set_device(env.local_rank)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"rank {env.rank} has no device cuda:{env.local_rank} here: {first_line(error)}; start as many ranks on a "
            "machine as it has devices"
        ) from None


def meet(env: RankEnvironment, timeout_s: float) -> dist.Store:
    """The store of these ranks, once all of them are there; blocks at most `timeout_s`. Raises LocalError."""
    limit = timedelta(seconds=timeout_s)
    try:
        if env.rendezvous:
            found: dist.Store = dist.FileStore(env.rendezvous, env.num_ranks)
        else:
            serves = env.rank == 0 and not env.launcher_serves
            found = dist.TCPStore(
                env.master_addr,
                env.master_port,
                is_master=serves,
                timeout=limit,
                wait_for_workers=False,
                multi_tenant=True,
            )
    except (RuntimeError, OSError) as error:
        raise LocalError(
            f"rank {env.rank} of {env.num_ranks} cannot meet the others at {_place(env)} within {timeout_s:g} s: "
            f"{first_line(error)}; start all ranks, and check that address"
        ) from error
    store = dist.PrefixStore(f"atoll/{env.start}/{next(_meetings)}", found)
    store.set_timeout(limit)
    keys = [f"here/{rank}" for rank in range(env.num_ranks)]
    try:
        store.set(keys[env.rank], "here")
        store.wait(keys, limit)
    except RuntimeError as error:
        raise LocalError(_who_is_missing(env, store, keys, timeout_s)) from error
    return store


def listening_host(env: RankEnvironment) -> str:
    """Where this rank listens for its siblings: loopback if all are on this machine, else the address of the interface
    that gloo was told to use, or that leads to `master_addr`. Raises LocalError if there is none."""
    alone = not env.master_addr  # the program made the group itself, and said nothing of other machines
    if alone or env.rendezvous or env.local_ranks == env.num_ranks or _is_loopback(env.master_addr):
        return LOOPBACK
    if env.gloo_interface:
        return _address_of(env.gloo_interface.split(",")[0])
    try:
        address = socket.getaddrinfo(env.master_addr, env.master_port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(address[0], socket.SOCK_DGRAM) as probe:
            probe.connect(address[4])  # sends nothing; the kernel chooses the interface
            return probe.getsockname()[0]
    except OSError as error:
        raise LocalError(
            f"no interface of this machine leads to MASTER_ADDR = {env.master_addr}: {error.strerror or error}; "
            "check the address, or set GLOO_SOCKET_IFNAME"
        ) from error


def gloo_options(host: str, timeout_s: float) -> object:
    """How a gloo group listens, and how long its waits are at most."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[missing-attribute]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    return options


def abandon(thing: object) -> None:
    """Never destroy `thing`: a process group's destructor waits for what is under way, and a frozen sibling's
    connections stay open. Even the interpreter's end would wait, hence one reference that nobody gives back."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def first_line(error: BaseException) -> str:
    """What torch says, without the many lines that it often adds."""
    lines = str(error).strip().splitlines()
    return lines[0].split(". This is typically")[0] if lines else type(error).__name__


def _of_program(env: RankEnvironment) -> RankGroup:
    """The group that the program made before it came to us."""
    num_ranks = dist.get_world_size()
    if num_ranks == 1:
        return RankGroup()
    # A program may take part several times over one group, and each time with a crew of its own.
    store = dist.PrefixStore(f"atoll/{next(_openings)}", distributed_c10d._get_default_store())
    return RankGroup(dist.get_rank(), num_ranks, listening_host(env), store)


def _who_is_missing(env: RankEnvironment, store: dist.Store, keys: list[str], timeout_s: float) -> str:
    try:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:  # the one that serves the store is gone
        missing = ["0"]
    names = ", ".join(missing) or "some"
    return (
        f"rank {names} of {env.num_ranks} did not come to {_place(env)} within {timeout_s:g} s "
        f"(this is rank {env.rank}); see what became of it, and start all ranks again"
    )


def _place(env: RankEnvironment) -> str:
    return env.rendezvous or f"{env.master_addr}:{env.master_port}"


def _address_of(interface: str) -> str:
    """Its IPv4 address, or else its IPv6 one."""
    addresses = {each.family: each.address for each in psutil.net_if_addrs().get(interface, [])}
    for family in (socket.AF_INET, socket.AF_INET6):
        if family in addresses:
            return addresses[family]
    names = ", ".join(sorted(psutil.net_if_addrs()))
    raise LocalError(
        f"GLOO_SOCKET_IFNAME = {interface}, but no such interface has an address; there are {names}"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
