"""Several engines in one process, and plans for them.

Contributions are distinct powers of two: a sum tells whose they are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from atoll import kernels
from atoll.comm.base import Bytes, Communicator
from atoll.comm.native import NativeCommunicator, Tls
from atoll.plan.grid import Grid
from atoll.values import Contribution, Lane, OpId, Plan, Range, RankInfo, ReduceReport

KEY = b"a session key for tests, 32 byte"
CONNECT_S = 5.0
TLS: Tls | None = None
"""Of every engine that does not say otherwise; the fixture `stream` sets it."""

CERTIFICATES = Path(__file__).parent / "certificates"


def certificates(name: str, authorities: str = "authority") -> Tls:
    """Keys made for tests, and worth nothing: `peer` (with an intermediate authority), `stranger`, `expired`."""
    return Tls(
        certificates=(CERTIFICATES / f"{name}.pem").read_text(),
        key=(CERTIFICATES / f"{name}.key").read_text(),
        authorities=(CERTIFICATES / f"{authorities}.pem").read_text(),
    )


def open_engine(
    peer: str,
    key: bytes = KEY,
    connect_timeout_s: float = CONNECT_S,
    port: int = 0,
    rank: int = 0,
    **options: Any,
) -> NativeCommunicator:
    """`options` are further arguments of NativeCommunicator."""
    return NativeCommunicator(
        run="test",
        peer=peer,
        rank=rank,
        session_key=key,
        bind_host="127.0.0.1",
        port=port,
        connect_timeout_s=connect_timeout_s,
        **{"tls": TLS} | options,
    )


def plan_for(
    ports: dict[str, int],
    numel: int,
    codec: str,
    op: OpId,
    weights: dict[str, int] | None = None,
    roots: Sequence[str] | None = None,
    deadline_s: float = 20.0,
    connections: int = 1,
) -> Plan:
    """Everybody contributes with weight 1, and roots a star, unless said otherwise."""
    members = tuple(sorted(ports))
    given = weights if weights is not None else dict.fromkeys(members, 1)
    return Plan(
        op=op,
        base_version=0,
        members=members,
        contributions=tuple(Contribution(peer, given[peer]) for peer in members if peer in given),
        ranks={peer: (RankInfo("127.0.0.1", ports[peer], (Range(0, numel),)),) for peer in members},
        lanes=tuple(Lane(root) for root in (members if roots is None else roots)),
        codec=codec,
        deadline_s=deadline_s,
        connections=connections,
    )


def encoded(grid: Grid, codec: str, values: np.ndarray | float) -> Bytes:
    """A vector on the wire; one number stands for a vector that is full of it."""
    vector = np.full(grid.numel, values, dtype=np.float32) if isinstance(values, float | int) else values
    out = np.empty(grid.wire_bytes(codec), dtype=np.uint8)
    assert kernels.encode(codec, grid.boundaries, np.ascontiguousarray(vector, dtype=np.float32), out)
    return out


def decoded(grid: Grid, codec: str, data: Bytes) -> np.ndarray:
    out = np.empty(grid.numel, dtype=np.float32)
    kernels.decode(codec, grid.boundaries, data, out)
    return out


def power_of(index: int) -> float:
    return float(2**index)


class Running:
    """One reduce in a thread of its own. `report()` waits for it, but not for ever."""

    def __init__(
        self,
        comm: Communicator,
        plan: Plan,
        grid: Grid,
        contribution: Bytes | None,
        result: Bytes | None = None,
    ) -> None:
        self.result = np.full(grid.wire_bytes(plan.codec), 0xAA, dtype=np.uint8) if result is None else result
        self._report: ReduceReport | None = None
        self._error: BaseException | None = None
        self._limit_s = plan.deadline_s + 30.0
        self._thread = threading.Thread(target=self._run, args=(comm, plan, grid, contribution), daemon=True)
        self._thread.start()

    def _run(self, comm: Communicator, plan: Plan, grid: Grid, contribution: Bytes | None) -> None:
        try:
            self._report = comm.reduce(plan, grid, contribution, self.result)
        except BaseException as error:
            self._error = error

    def report(self) -> ReduceReport:
        self._thread.join(self._limit_s)
        assert not self._thread.is_alive(), "reduce did not return: it hangs"
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report


class Engines:
    """Peers in this process, by name, or so many `p0`, `p1`, ...; peer `i` contributes 2**i."""

    def __init__(
        self, peers: int | Iterable[str], connect_timeout_s: float = CONNECT_S, **options: Any
    ) -> None:
        names = [f"p{i}" for i in range(peers)] if isinstance(peers, int) else list(peers)
        self.comms = {
            peer: open_engine(peer, connect_timeout_s=connect_timeout_s, **options) for peer in names
        }

    def __enter__(self) -> Engines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for comm in self.comms.values():
            comm.close()

    @property
    def ports(self) -> dict[str, int]:
        return {peer: comm.port for peer, comm in self.comms.items()}

    def plan(self, grid: Grid, codec: str, op: OpId, **options: object) -> Plan:
        return plan_for(self.ports, grid.numel, codec, op, **options)  # type: ignore[arg-type]

    def begin(
        self, plan: Plan, grid: Grid, values: dict[str, np.ndarray] | None = None
    ) -> dict[str, Running]:
        """All engines that are in the plan, at once; only the plan's contributors give something."""
        contributors = {contribution.peer for contribution in plan.contributions}
        running = {}
        for index, (peer, comm) in enumerate(self.comms.items()):
            if peer not in plan.members:
                continue
            value = values[peer] if values is not None else power_of(index)
            contribution = encoded(grid, plan.codec, value) if peer in contributors else None
            running[peer] = Running(comm, plan, grid, contribution)
        return running

    def reduce(self, plan: Plan, grid: Grid, values: dict[str, np.ndarray] | None = None) -> list[Bytes]:
        """Everybody's finished bytes; all must have succeeded."""
        running = self.begin(plan, grid, values)
        for one in running.values():
            report = one.report()
            assert report.ok, report.reason
        return [one.result for one in running.values()]
