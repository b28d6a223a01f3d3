"""The communicator of real runs: the C++ engine over TCP. Here a plan becomes nodes, lanes and chunks.

Threads: the engine owns its own (see `docs/threads.md`); `reduce` is called from one thread at a time per op,
`abort` and `close` from any.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll import _native
from atoll.comm.base import Bytes
from atoll.errors import LocalError
from atoll.plan.chunks import chunk_table
from atoll.plan.grid import Grid
from atoll.values import Edge, NodeId, OpId, Plan, ReduceReport, TransferStats

_LOOK_UP_S = 0.2
"""While it waits for the engine, Python looks up this often: a signal handler must get its turn."""

_Report = tuple[bool, str, list[tuple[int, int]], dict[str, float]]
_Lane = tuple[int, list[int], list[int], list[int]]


@dataclass(frozen=True, slots=True)
class Expansion:
    """A plan in the engine's terms. Nodes are named by their index in `nodes`."""

    nodes: tuple[NodeId, ...]
    addresses: tuple[tuple[str, int], ...]
    lanes: tuple[_Lane, ...]


def expand(plan: Plan, rank: int) -> Expansion:
    """All ranks of all members are nodes; a lane joins those of number `rank`, which own the same range.

    ValueError if a member has no such rank.
    """
    nodes, addresses = [], []
    for peer in plan.members:
        for number, info in enumerate(plan.ranks[peer]):
            nodes.append(NodeId(peer, number))
            addresses.append((info.host, info.port))
    index = {node: position for position, node in enumerate(nodes)}

    def node_of(peer: str) -> int:
        if NodeId(peer, rank) not in index:
            raise ValueError(f"op {plan.op}: {peer!r} has no rank {rank} among the plan's members")
        return index[NodeId(peer, rank)]

    sources = [node_of(contribution.peer) for contribution in plan.contributions]
    weights = [contribution.weight for contribution in plan.contributions]
    sinks = [node_of(peer) for peer in plan.members]
    lanes = tuple((node_of(lane.root), sources, weights, sinks) for lane in plan.lanes)
    return Expansion(tuple(nodes), tuple(addresses), lanes)


class NativeCommunicator:
    """One rank's engine: a listening socket, a loop thread, and `num_workers` threads that sum."""

    def __init__(
        self,
        *,
        run: str,
        peer: str,
        rank: int,
        session_key: bytes,
        bind_host: str,
        port: int = 0,
        connect_timeout_s: float = 10.0,
        num_workers: int = 2,
    ) -> None:
        """`port` 0 lets the system choose. Raises LocalError if the address cannot be had.

        `connect_timeout_s` bounds a connection and its hello, and how long a link may take no bytes from us.
        """
        self._rank = rank
        try:
            self._engine = _native.Engine(
                run=run,
                peer=peer,
                rank=rank,
                session_key=session_key,
                bind_host=bind_host,
                port=port,
                connect_timeout_s=connect_timeout_s,
                num_workers=num_workers,
            )
        except OSError as error:
            raise LocalError(
                f"the engine cannot listen on {bind_host} port {port}: {error.strerror}; choose a free port "
                "(0: any) and an address of this machine"
            ) from error

    @property
    def port(self) -> int:
        return self._engine.port

    def set_session_key(self, session_key: bytes) -> None:
        """For connections to come; those that are up stay."""
        self._engine.set_session_key(session_key)

    def stats(self) -> dict[str, int]:
        """Totals since the start, counted at the sockets; see `atoll._native.Engine.stats`."""
        return self._engine.stats()

    def reduce(self, plan: Plan, grid: Grid, contribution: Bytes | None, result: Bytes) -> ReduceReport:
        """See `Communicator.reduce`. A plan that makes no sense, or an op used before, is a failed report.

        ValueError and TypeError are for the caller's own buffers: wrong length, wrong type, not writable.
        """
        _check_length("result", result, grid, plan.codec)
        if contribution is not None:
            _check_length("contribution", contribution, grid, plan.codec)
        op = (plan.op.term, plan.op.round, plan.op.fragment, plan.op.attempt)
        try:
            expansion = expand(plan, self._rank)
            self._start(op, plan, expansion, grid, contribution, result)
        except ValueError as error:
            return ReduceReport(ok=False, reason=str(error))
        ok, reason, broken, stats = self._wait(op)
        return ReduceReport(
            ok=ok,
            reason=reason,
            broken=_edges(expansion.nodes, broken),
            stats=TransferStats(
                sent_bytes=int(stats["sent_bytes"]),
                received_bytes=int(stats["received_bytes"]),
                wire_s=stats["wire_s"],
                encode_s=stats["encode_s"],
            ),
        )

    def abort(self, op: OpId) -> None:
        self._engine.abort((op.term, op.round, op.fragment, op.attempt))

    def close(self) -> None:
        self._engine.close()

    def _start(
        self,
        op: tuple[int, int, int, int],
        plan: Plan,
        expansion: Expansion,
        grid: Grid,
        contribution: Bytes | None,
        result: Bytes,
    ) -> None:
        chunks = chunk_table(grid, plan.lanes, plan.codec)
        self._engine.start(
            op=op,
            nodes=[
                (node.peer, node.rank, host, port)
                for node, (host, port) in zip(expansion.nodes, expansion.addresses, strict=True)
            ],
            lanes=list(expansion.lanes),
            codec=plan.codec,
            boundaries=grid.boundaries,
            chunk_starts=chunks.starts,
            chunk_lanes=chunks.lanes,
            contribution=contribution,
            result=result,
            deadline_s=plan.deadline_s,
        )

    def _wait(self, op: tuple[int, int, int, int]) -> _Report:
        """Until the engine reports, which it does at the op's deadline at the latest."""
        try:
            while (report := self._engine.wait(op, _LOOK_UP_S)) is None:
                pass
        except BaseException:  # from a signal handler: the buffers must be free before it goes on
            self._engine.abort(op)
            while self._engine.wait(op, _LOOK_UP_S) is None:
                pass
            raise
        return report


def _check_length(what: str, buffer: Bytes, grid: Grid, codec: str) -> None:
    wanted = grid.wire_bytes(codec)
    if np.size(buffer) != wanted:
        raise ValueError(
            f"the {what} has {np.size(buffer)} bytes; {grid.numel} elements in {codec} take {wanted}"
        )


def _edges(nodes: tuple[NodeId, ...], pairs: list[tuple[int, int]]) -> tuple[Edge, ...]:
    """Links between nodes as links between peers, each once."""
    return tuple(sorted({Edge(nodes[source].peer, nodes[target].peer) for source, target in pairs}))
