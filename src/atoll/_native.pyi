"""Types of the native core (C++, see native/). Arrays are never converted: wrong dtype, stride or order is a TypeError."""

import numpy as np
from numpy.typing import NDArray

# ---- kernels (native/kernels, native/bindings/kernels.cc) ----
# `boundaries` are a Grid's: int64, from 0 to numel. `codec` is a name of atoll.values.CODECS; others raise ValueError.
# All kernels set round-to-nearest and denormals-on on entry, restore on exit, and release the interpreter lock.

def encode(
    codec: str, boundaries: NDArray[np.int64], values: NDArray[np.float32], out: NDArray[np.uint8]
) -> bool:
    """Encode all of `values` into `out` (wire bytes, block after block). False if a value is not finite (out unspecified)."""

def decode(
    codec: str, boundaries: NDArray[np.int64], data: NDArray[np.uint8], out: NDArray[np.float32]
) -> None: ...
def weighted_mean(
    codec: str,
    boundaries: NDArray[np.int64],
    contributions: list[NDArray[np.uint8]],
    weights: list[int],
    out: NDArray[np.uint8],
) -> bool:
    """The reduction formula, on whole vectors: acc = 0; for each in order: acc = acc + fp32(w) * x (two roundings);
    out = encode(acc / fp32(sum of w)). False if the mean is not finite. The engine uses the same code per chunk."""

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

def subtract(anchor: NDArray[np.float32], local: NDArray[np.float32], out: NDArray[np.float32]) -> None: ...
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
    ) -> None:
        """Raises OSError (errno set) if the address cannot be bound."""
    @property
    def port(self) -> int: ...
    def set_session_key(self, session_key: bytes) -> None: ...
    def start(
        self,
        *,
        op: tuple[int, int, int, int],
        nodes: list[tuple[str, int, str, int]],
        lanes: list[tuple[int, list[int], list[int], list[int]]],
        codec: str,
        boundaries: NDArray[np.int64],
        chunk_starts: NDArray[np.int64],
        chunk_lanes: NDArray[np.int64],
        contribution: NDArray[np.uint8] | None,
        result: NDArray[np.uint8],
        deadline_s: float,
    ) -> None:
        """Begin an op and return at once. nodes: (peer, rank, host, port); lanes: (root node, source nodes in sum order,
        their weights, sink nodes). ValueError for a malformed plan, for an op that is known already, or for one that was
        aborted before it began (then nothing is started). Keeps references to the arrays until the op has ended."""
    def wait(
        self, op: tuple[int, int, int, int], timeout_s: float
    ) -> tuple[bool, str, list[tuple[int, int]], dict[str, float]] | None:
        """Blocks without the interpreter lock. None if still running after `timeout_s`; else (ok, reason, broken (from, to)
        node pairs, {sent_bytes, received_bytes, wire_s, encode_s}). Once it has returned a report, the op is forgotten
        (its id stays refused) and no thread reads or writes its buffers."""
    def abort(self, op: tuple[int, int, int, int]) -> None:
        """From any thread; the op's wait returns within 100 ms. An unknown op is remembered as aborted."""
    def stats(self) -> dict[str, int]:
        """Totals since the start: sent_bytes, received_bytes (counted at the sockets), connections, refused_hellos,
        dropped_frames, open_fds."""
    def close(self) -> None: ...
