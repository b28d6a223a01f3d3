"""Types of the native core (C++, see native/). Arrays are never converted: wrong dtype, stride or order is a TypeError."""

import numpy as np
from numpy.typing import NDArray

# ---- kernels (native/kernels, native/bindings/kernels.cc) ----
# `boundaries` are a Grid's: int64, from 0 to numel. `codec` is a name of atoll.values.CODECS; others raise ValueError.
# All kernels set round-to-nearest and denormals-on on entry, restore on exit, and release the interpreter lock.

def encode(
    codec: str, boundaries: NDArray[np.int64], values: NDArray[np.float32], out: NDArray[np.uint8]
) -> bool:
    """Encode all of `values` into `out` (wire bytes, block after block). False if a value is not finite, or would not be
    once encoded (out unspecified)."""

def decode(
    codec: str, boundaries: NDArray[np.int64], data: NDArray[np.uint8], out: NDArray[np.float32]
) -> None: ...
def encode_with_feedback(
    codec: str,
    boundaries: NDArray[np.int64],
    delta: NDArray[np.float32],
    residual: NDArray[np.float32],
    beta: float,
    out: NDArray[np.uint8],
) -> bool:
    """`encode` of delta + fp32(beta) * residual (two roundings), in one pass; the residual is only read."""

def update_residual(
    codec: str,
    boundaries: NDArray[np.int64],
    delta: NDArray[np.float32],
    beta: float,
    data: NDArray[np.uint8],
    residual: NDArray[np.float32],
) -> None:
    """In place: residual = (delta + fp32(beta) * residual) - decode(data), three roundings."""

def weighted_mean(
    codec: str,
    boundaries: NDArray[np.int64],
    contributions: list[NDArray[np.uint8]],
    weights: list[int],
    out: NDArray[np.uint8],
) -> bool:
    """The reduction formula, on whole vectors: acc = 0; for each in order: acc = acc + fp32(w) * x (two roundings);
    out = encode(acc / fp32(sum of w)). Those of weight 0 are left out; if one is left, out is a copy of it. False if
    the mean is not finite. The engine uses the same code per chunk."""

def outer_step(
    anchor: NDArray[np.float32],
    velocity: NDArray[np.float32],
    mean: NDArray[np.float32],
    lr: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """In place, plain IEEE fp32, no fused multiply-add: v = momentum*v + mean; step = mean + momentum*v (nesterov) or v;
    anchor = anchor - lr*step. momentum 0: anchor = anchor - lr*mean and velocity untouched."""

def digest_pieces(values: NDArray[np.float32], start: int, piece: int) -> NDArray[np.uint64]:
    """(pieces, 2) table: for each piece of `piece` elements of global coordinates that [start, start+len) touches, the
    2x64-bit wrapping sum of mix(global index, bits). Sums of disjoint ranges add up."""

def digest_bytes(data: NDArray[np.uint8]) -> bytes:
    """16 bytes that depend on every byte and its position."""

def squared_norm(values: NDArray[np.float32]) -> float:
    """Sum of squares in fp64, in a fixed order. Not finite if any value is not."""

def sha256(data: bytes) -> bytes: ...
def hmac_sha256(key: bytes, data: bytes) -> bytes: ...
def kernel_target() -> str:
    """Which instruction set the kernels run on: the last of `kernel_targets()`, unless a test chose another."""

def kernel_targets() -> list[str]:
    """What this machine can run, slowest first: "baseline", "x86-64-v3", "x86-64-v4". All compute the same bits."""

def set_kernel_target(name: str) -> None:
    """For tests and benchmarks, while no kernel runs. ValueError if this machine cannot run it."""

# ---- engine (native/engine, native/bindings/engine.cc) ----

class Engine:
    """One rank's end of the collective. Owns one event-loop thread and a small pool; close() joins them."""

    def __init__(
        self,
        *,
        run: str,
        peer: str,
        rank: int,
        session_key: bytes,
        bind_host: str,
        port: int,
        connect_timeout_s: float,
        num_workers: int,
        progress_timeout_s: float = 5.0,
        congestion: str = "",
        buffer_bytes: int = 0,
        max_up_bytes_per_s: float = 0.0,
        max_down_bytes_per_s: float = 0.0,
        tls_certificates: str = "",
        tls_key: str = "",
        tls_authorities: str = "",
        tls_named: bool = False,
    ) -> None:
        """Raises OSError (errno set) if the address cannot be bound, ValueError for options that make no sense.

        A node from which nothing came for `progress_timeout_s`, not even the answer to a ping, is lost to an op; one
        without any link, after the smaller of the two timeouts. `congestion` is the sockets' congestion control, ""
        the system's. `buffer_bytes` of each socket, 0: the system tunes them. The rates hold over all links together, 0:
        no limit. TLS in PEM: own certificate and chain, its key, the authorities that are believed; all empty: plain TCP."""
    @property
    def port(self) -> int: ...
    def set_session_key(self, session_key: bytes) -> None: ...
    def start(
        self,
        *,
        op: tuple[int, int, int, int],
        nodes: list[tuple[str, int, str, int, int]],
        lanes: list[tuple[int, list[int], list[int], list[int], list[int]]],
        codec: str,
        boundaries: NDArray[np.int64],
        chunk_starts: NDArray[np.int64],
        chunk_lanes: NDArray[np.int64],
        contribution: NDArray[np.uint8] | None,
        result: NDArray[np.uint8],
        deadline_s: float,
        connections: int = 1,
        order: int = 0,
        held: NDArray[np.uint8] | None = None,
    ) -> None:
        """Begin an op and return at once. nodes: (peer, rank, host, port, stamp of what it contributes or 0);
        lanes: (root node, source nodes in sum order, their weights, by node where it sends to and where it hears from, -1
        for neither); connections: so many links are kept with every node that data is exchanged with, 1 to 64;
        order: 64 bits that name the order of the model's elements in the vector, the same on all nodes; held: by chunk,
        whether this node's buffers hold it (1 or 0), one after the other; None: all.
        ValueError for a malformed plan, for an op that is known already, or for one that was
        aborted before it began (then nothing is started). Keeps references to the arrays until the op has ended."""
    def wait(
        self, op: tuple[int, int, int, int], timeout_s: float
    ) -> (
        tuple[bool, str, list[tuple[int, int]], dict[str, float], list[tuple[int, int, float, float, float]]]
        | None
    ):
        """Blocks without the interpreter lock. None if still running after `timeout_s`; else (ok, reason, broken (from, to)
        node pairs, {sent_bytes, received_bytes, wire_s, encode_s}, rates). rates: (from, to, bytes/s, round trip in s or 0,
        share of segments lost without a queue or 0) of every directed link that carried at least 256 KiB; -1 stands for all others together. Once it has returned a report, the op is forgotten
        (its id stays refused) and no thread reads or writes its buffers."""
    def abort(self, op: tuple[int, int, int, int]) -> None:
        """From any thread; the op's wait returns within 100 ms. An unknown op is remembered as aborted."""
    def probe(
        self, nodes: list[tuple[str, int, str, int]], bytes: int, deadline_s: float, connections: int = 1
    ) -> list[tuple[float, float, str]]:
        """Measure the way to each (peer, rank, host, port) by sending it `bytes`, in time that no op needs. Blocks, without
        the interpreter lock, at most `deadline_s`. For each node (bytes/s, round trip in s, "") or (0, 0, why not)."""
    def reach(self, targets: list[tuple[str, int, str, int]], deadline_s: float) -> list[tuple[str, str]]:
        """Dial each (peer, rank, host, port), whoever's turn it is; links that come of it stay. Blocks, without the
        interpreter lock, at most `deadline_s`. For each (the address that said the right hello, "") or ("", why not).
        `host` may be several hosts, here and in `start` and `probe`: "10.0.0.1,[2001:db8::1]:7000"."""
    def stats(self) -> dict[str, int]:
        """Totals since the start: sent_bytes, received_bytes (counted at the sockets), connections, dialled_links and
        accepted_links (that ever came up), refused_hellos, broken_links, dropped_frames, open_fds."""
    def close(self) -> None: ...

def tls_is_built() -> bool: ...
