"""The communicator of real runs: the C++ engine over TCP. Here a plan becomes nodes, lanes and chunks.

Threads: the engine owns its own (see `docs/threads.md`); `reduce` is called from one thread at a time per op,
`abort` and `close` from any.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from atoll import _native
from atoll.comm.base import Bytes
from atoll.errors import LocalError
from atoll.network.chosen_paths import ordered
from atoll.plan.chunks import chunk_table
from atoll.plan.grid import Grid
from atoll.plan.links import CROWD, carried_at_once
from atoll.plan.routes import Part, Routing, routing_of
from atoll.plan.trees import parents_of
from atoll.values import Edge, LinkRate, NodeId, OpId, Plan, RankInfo, ReduceReport, TransferStats

_LOOK_UP_S = 0.2
"""While it waits for the engine, Python looks up this often: a signal handler must get its turn."""

_Rate = tuple[int, int, float, float, float]
"""From, to (node indices, -1: all others), bytes per second, round trip in seconds, loss."""
_Report = tuple[bool, str, list[tuple[int, int]], dict[str, float], list[_Rate]]
_Lane = tuple[int, list[int], list[int], list[int], list[int]]
_NOBODY = -1


@dataclass(frozen=True, slots=True)
class Expansion:
    """A plan in the engine's terms. Nodes are named by their index in `nodes`; `stamps` name what each contributes.
    `lanes` are the plan's, for route after route."""

    nodes: tuple[NodeId, ...]
    addresses: tuple[tuple[str, int], ...]
    stamps: tuple[int, ...]
    lanes: tuple[_Lane, ...]


def expand(plan: Plan, routing: Routing) -> Expansion:
    """All ranks of all members are nodes; a lane joins, on each route, the ranks that own it.

    ValueError if a lane does not fit the members.
    """
    nodes, addresses, stamps, first = [], [], [], []
    digests = {contribution.peer: contribution.digest for contribution in plan.contributions}
    for peer in plan.members:
        first.append(len(nodes))
        for number, info in enumerate(plan.ranks[peer]):
            nodes.append(NodeId(peer, number))
            addresses.append((hosts_of(info), info.port))
            stamps.append(_stamp(digests.get(peer, "")))
    index = {peer: member for member, peer in enumerate(plan.members)}
    for contribution in plan.contributions:
        if contribution.peer not in index:
            raise ValueError(
                f"op {plan.op}: contributor {contribution.peer!r} is not among the plan's members"
            )
    sources = [index[contribution.peer] for contribution in plan.contributions]
    weights = [contribution.weight for contribution in plan.contributions]
    trees = [(index.get(lane.root, 0), *parents_of(lane, plan.members)) for lane in plan.lanes]

    lanes = []
    for ranks in routing.routes:
        of_member = [start + rank for start, rank in zip(first, ranks, strict=True)]

        def tree(parents: Sequence[int], of_member: list[int] = of_member) -> list[int]:
            by_node = [_NOBODY] * len(nodes)
            for node, parent in zip(of_member, parents, strict=True):
                by_node[node] = of_member[parent] if parent >= 0 else _NOBODY
            return by_node

        of_sources = [of_member[source] for source in sources]
        lanes += [(of_member[root], of_sources, weights, tree(up), tree(down)) for root, up, down in trees]
    return Expansion(tuple(nodes), tuple(addresses), tuple(stamps), tuple(lanes))


def hosts_of(rank: RankInfo) -> str:
    """All hosts of a rank, as the engine takes them: the one to be dialled first, as a VPN on this machine measured."""
    return ",".join(ordered(rank.hosts))


def _stamp(digest: str) -> int:
    """64 bits that stand for a contribution's digest; 0 for none."""
    return int.from_bytes(hashlib.sha256(digest.encode()).digest()[:8], "little") if digest else 0


def tls_is_built() -> bool:
    """Whether this build can speak TLS (it needs OpenSSL's headers)."""
    return _native.tls_is_built()


@dataclass(frozen=True, slots=True)
class Tls:
    """What a rank shows and whom it believes, in PEM. `certificates`: its own, then those that lead to an authority.
    `named`: certificates hold their peers' names (`network.authority.peer_name`), and nobody passes for another."""

    certificates: str
    key: str
    authorities: str
    named: bool = False


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
        progress_timeout_s: float = 5.0,
        congestion: str = "",
        max_up_bytes_per_s: float = 0.0,
        max_down_bytes_per_s: float = 0.0,
        tls: Tls | None = None,
    ) -> None:
        """`port` 0 lets the system choose; `bind_host` "" is every address, IPv4 and IPv6. Raises LocalError if the
        address cannot be had.

        `connect_timeout_s` bounds a connection and its hello. A node from which nothing came for `progress_timeout_s`,
        not even an answer, is lost to the op. `congestion` names the sockets' congestion control, "" is the system's;
        ValueError, with those there are, if the system has no such. The rates hold over all links together; 0 is no
        limit. With `tls` all links are TLS 1.3 and both ends show certificates; ValueError if they are no use, or if
        this build has no TLS.
        """
        self._peer, self._rank = peer, rank
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
                progress_timeout_s=progress_timeout_s,
                congestion=congestion,
                max_up_bytes_per_s=max_up_bytes_per_s,
                max_down_bytes_per_s=max_down_bytes_per_s,
                tls_certificates=tls.certificates if tls else "",
                tls_key=tls.key if tls else "",
                tls_authorities=tls.authorities if tls else "",
                tls_named=tls.named if tls else False,
            )
        except OSError as error:
            raise LocalError(
                f"the engine cannot listen on {bind_host or 'any address'} port {port}: {error.strerror}; choose a "
                "free port (0: any) and an address of this machine"
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
        try:
            routing = routing_of(plan, grid)
            part = routing.part(self._peer, self._rank)
        except ValueError as error:
            return ReduceReport(ok=False, reason=f"op {plan.op}: {error}")
        _check_length("result", result, part.grid, plan.codec)
        if contribution is not None:
            _check_length("contribution", contribution, part.grid, plan.codec)
        op = (plan.op.term, plan.op.round, plan.op.fragment, plan.op.attempt)
        try:
            expansion = expand(plan, routing)
            self._start(op, plan, expansion, routing, part, contribution, result)
        except ValueError as error:
            return ReduceReport(ok=False, reason=str(error))
        ok, reason, broken, stats, rates = self._wait(op)
        return ReduceReport(
            ok=ok,
            reason=reason,
            broken=_edges(expansion.nodes, broken),
            stats=TransferStats(
                sent_bytes=int(stats["sent_bytes"]),
                received_bytes=int(stats["received_bytes"]),
                wire_s=stats["wire_s"],
                encode_s=stats["encode_s"],
                links=_links(expansion.nodes, rates),
            ),
        )

    def probe(
        self, peer: str, rank: RankInfo, num_bytes: int, deadline_s: float, connections: int
    ) -> tuple[float, float, str]:
        """Measure the way to rank 0 of a peer by sending it `num_bytes`, while no op runs: (bytes per second, round
        trip in seconds, ""), or (0, 0, why not). Blocks, at most `deadline_s`."""
        targets = [(peer, 0, hosts_of(rank), rank.port)]
        try:
            (found,) = self._engine.probe(targets, num_bytes, deadline_s, connections)
        except ValueError as error:
            return 0.0, 0.0, str(error)
        return found

    def reach(self, targets: Mapping[str, RankInfo], trial_s: float) -> tuple[dict[str, str], dict[str, str]]:
        """Dial rank 0 of each peer, whoever's turn it is: by peer, the address that said the right hello, and why the
        others did not. Blocks, at most `trial_s`."""
        nodes = [(peer, 0, hosts_of(rank), rank.port) for peer, rank in targets.items()]
        try:
            results = self._engine.reach(nodes, trial_s)
        except ValueError as error:
            return {}, dict.fromkeys(targets, str(error))
        where = {peer: at for peer, (at, _) in zip(targets, results, strict=True) if at}
        failed = {peer: why for peer, (at, why) in zip(targets, results, strict=True) if not at}
        return where, failed

    def abort(self, op: OpId) -> None:
        self._engine.abort((op.term, op.round, op.fragment, op.attempt))

    def close(self) -> None:
        self._engine.close()

    def _start(
        self,
        op: tuple[int, int, int, int],
        plan: Plan,
        expansion: Expansion,
        routing: Routing,
        part: Part,
        contribution: Bytes | None,
        result: Bytes,
    ) -> None:
        grid = routing.grid
        chunks = chunk_table(grid, plan.lanes, plan.codec, plan.chunk_bytes, routing.cuts)
        holds_all = len(part.routes) == len(routing.routes)
        self._engine.start(
            op=op,
            nodes=[
                (node.peer, node.rank, host, port, stamp)
                for node, (host, port), stamp in zip(
                    expansion.nodes, expansion.addresses, expansion.stamps, strict=True
                )
            ],
            lanes=list(expansion.lanes),
            codec=plan.codec,
            boundaries=grid.boundaries,
            chunk_starts=chunks.starts,
            chunk_lanes=chunks.routes * len(plan.lanes) + chunks.lanes,
            contribution=contribution,
            result=result,
            deadline_s=plan.deadline_s,
            connections=plan.connections,
            order=routing.order_key,
            held=None if holds_all else np.isin(chunks.routes, part.routes).view(np.uint8),
        )

    def _wait(self, op: tuple[int, int, int, int]) -> _Report:
        """Until the engine reports, which it does at the op's deadline at the latest."""
        try:
            while (report := self._engine.wait(op, _LOOK_UP_S)) is None:
                pass
        except BaseException:  # from a signal handler: the buffers must be free before it goes on
            self._engine.abort(op)
            with contextlib.suppress(ValueError):  # it has just reported: the engine knows the op no more
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


def _links(nodes: tuple[NodeId, ...], rates: list[_Rate]) -> tuple[LinkRate, ...]:
    """Rates between nodes as rates between peers. In a crowd only the lines', with the longest round trip."""

    def peer(index: int) -> str:
        return nodes[index].peer if index >= 0 else ""  # all others together

    if len(nodes) > CROWD:
        longest_s = max((rtt_s for _, _, _, rtt_s, _ in rates), default=0.0)
        rates = [
            (source, target, rate, longest_s, 0.0)
            for source, target, rate, _, _ in rates
            if min(source, target) < 0
        ]
    return carried_at_once(
        LinkRate(peer(source), peer(target), rate, rtt_s, loss) for source, target, rate, rtt_s, loss in rates
    )
