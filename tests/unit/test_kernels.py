"""The outer step, digests, norms and hashes, on every instruction set."""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from atoll import _native, kernels
from atoll.plan.grid import Grid

Floats = NDArray[np.float32]
SIZES = (0, 1, 7, 13, 255, 256, 257, 1023)


@pytest.fixture(params=_native.kernel_targets(), autouse=True)
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.kernel_target()
    _native.set_kernel_target(request.param)
    yield request.param
    _native.set_kernel_target(before)


def normals(seed: int, size: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(size, np.float32)


def test_targets_are_named(target: str) -> None:
    assert _native.kernel_target() == target
    with pytest.raises(ValueError, match="cannot run target 'sparc'"):
        _native.set_kernel_target("sparc")


# ---- the outer step ----


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("lr", "momentum", "nesterov"), [(0.7, 0.9, True), (0.7, 0.9, False), (1.0, 0.0, True)]
)
def test_outer_step_equals_numpy_to_the_bit(size: int, lr: float, momentum: float, nesterov: bool) -> None:
    anchor, velocity, mean = normals(1, size), normals(2, size), normals(3, size)
    a, v = anchor.copy(), velocity.copy()
    for _ in range(3):
        kernels.outer_step(anchor, velocity, mean, lr, momentum, nesterov)
        m, rate = np.float32(momentum), np.float32(lr)
        if momentum == 0:
            a = a - rate * mean
        else:
            v = m * v + mean
            a = a - rate * (mean + m * v if nesterov else v)
    assert anchor.tobytes() == a.tobytes()
    assert velocity.tobytes() == v.tobytes()


def test_a_constant_mean_gives_the_closed_form_steps() -> None:
    """E25: with lr 0.7 and momentum 0.9 the steps are 1.33, 1.897, ... and tend to 7 times the mean."""
    anchor, velocity = np.zeros(1, np.float32), np.zeros(1, np.float32)
    steps = []
    for _ in range(60):
        before = float(anchor[0])
        kernels.outer_step(anchor, velocity, np.ones(1, np.float32), 0.7, 0.9)
        steps.append(before - float(anchor[0]))
    expected = [0.7 * (1 + 0.9 * (1 - 0.9 ** (n + 1)) / 0.1) for n in range(60)]
    assert steps[:2] == pytest.approx([1.33, 1.897], abs=1e-6)
    assert steps == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_zero_mean_from_rest_moves_nothing(momentum: float) -> None:
    """E24, the outer half."""
    anchor = normals(24, 1000)
    before = anchor.tobytes()
    kernels.outer_step(anchor, np.zeros(1000, np.float32), np.zeros(1000, np.float32), 0.7, momentum)
    assert anchor.tobytes() == before


# ---- norm ----


@pytest.mark.parametrize("size", SIZES)
def test_norm(size: int) -> None:
    values = normals(5, size)
    sums = np.zeros(8)
    for index, value in enumerate(values.astype(np.float64)):
        sums[index % 8] += value * value
    pairs = sums[0::2] + sums[1::2]
    assert kernels.squared_norm(values) == (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_norm_shows_what_is_not_finite(bad: float) -> None:
    values = normals(7, 1000)
    values[997] = bad
    assert not np.isfinite(kernels.squared_norm(values))
    assert np.isfinite(kernels.squared_norm(np.full(1000, np.finfo(np.float32).max, np.float32)))


# ---- digests ----


def test_rows_of_any_cuts_add_up() -> None:
    values, piece = normals(8, 1000), 300
    whole = kernels.digest_pieces(values, 0, piece)
    assert whole.shape == (4, 2)
    rng = np.random.default_rng(9)
    for _ in range(20):
        cuts = np.sort(rng.integers(0, 1001, 3))
        table = np.zeros((4, 2), np.uint64)
        for start, stop in zip([0, *cuts], [*cuts, 1000], strict=True):
            part = kernels.digest_pieces(values[start:stop], int(start), piece)
            table[start // piece : start // piece + len(part)] += part
        assert (table == whole).all(), cuts


def test_a_flipped_bit_shows_in_its_piece_only() -> None:
    values, piece = normals(10, 1000), 300
    whole = kernels.digest_pieces(values, 0, piece)
    rng = np.random.default_rng(11)
    for _ in range(100):
        where, bit = int(rng.integers(1000)), int(rng.integers(32))
        flipped = values.copy()
        flipped.view(np.uint32)[where] ^= np.uint32(1 << bit)
        differs = (kernels.digest_pieces(flipped, 0, piece) != whole).all(axis=1)
        assert list(np.flatnonzero(differs)) == [where // piece], (where, bit)


def test_order_and_position_count() -> None:
    values = normals(12, 1000)
    digest = kernels.state_digest([kernels.digest_pieces(values)])
    assert len(digest) == 64
    assert digest == hashlib.sha256(kernels.digest_pieces(values).tobytes()).hexdigest()
    assert digest != kernels.state_digest([kernels.digest_pieces(values[::-1].copy())])
    assert digest != kernels.state_digest([kernels.digest_pieces(values, 1)])
    assert kernels.digest_pieces(values[:0]).shape == (0, 2)


def test_digests_are_sums_of_splitmix64() -> None:
    """For good: a change makes members of different builds disagree, so it needs a new wire version."""
    table = [[0, 0], [0, 0]]
    for index, bits in enumerate(normals(13, 200).view(np.uint32).tolist(), start=123):
        mixed = (index * 0x9E3779B97F4A7C15 + bits) % 2**64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed ^= mixed >> 27
        table[index // 300][0] += mixed
        mixed = mixed * 0x94D049BB133111EB % 2**64
        table[index // 300][1] += mixed ^ mixed >> 31
    expected = np.asarray([[a % 2**64, b % 2**64] for a, b in table], np.uint64)
    np.testing.assert_array_equal(kernels.digest_pieces(normals(13, 200), 123, 300), expected)
    golden = "dfb515a142ccc75b337533eac68e0989"
    assert kernels.digest_bytes(np.arange(1001).astype(np.uint8)).hex() == golden


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 63, 64, 1023])
def test_digest_of_bytes_depends_on_each_byte_and_the_length(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    seen = {kernels.digest_bytes(data), kernels.digest_bytes(np.append(data, np.uint8(0)))}
    for where in range(size):
        changed = data.copy()
        changed[where] ^= 1
        seen.add(kernels.digest_bytes(changed))
    assert len(seen) == size + 2
    assert {len(digest) for digest in seen} == {16}


def test_bad_pieces_are_refused() -> None:
    with pytest.raises(ValueError, match="piece is 0"):
        kernels.digest_pieces(normals(1, 4), 0, 0)
    with pytest.raises(ValueError, match="start is -1"):
        kernels.digest_pieces(normals(1, 4), -1)


# ---- hashes ----


@pytest.mark.parametrize("size", [0, 1, 55, 56, 63, 64, 65, 119, 120, 1000])
def test_hashes_equal_hashlib(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    assert _native.sha256(data) == hashlib.sha256(data).digest()
    for key in (b"", b"k" * 32, b"k" * 64, b"k" * 65):
        assert _native.hmac_sha256(key, data) == hmac.digest(key, data, "sha256")


# ---- threads and outputs ----


def test_other_threads_run_during_a_call() -> None:
    grid = Grid.of([1 << 20])
    data = np.zeros(grid.wire_bytes("int8"), np.uint8)
    out = np.empty_like(data)
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        for _ in range(20):  # a busy machine may not run the other thread the first time
            start = time.perf_counter()
            kernels.weighted_mean("int8", grid.boundaries, [data] * 100, [1] * 100, out)
            end = time.perf_counter()
            margin = (end - start) / 4
            if any(start + margin < at < end - margin for at in ticks):
                return
    finally:
        stop.set()
        thread.join()
    pytest.fail("no other thread ran during twenty calls: the interpreter lock was held")


def test_in_place_arguments_are_never_copies() -> None:
    good, strided = normals(1, 8), normals(2, 16)[::2]
    read_only = normals(3, 8)
    read_only.flags.writeable = False
    for bad in (strided, good.astype(np.float64), read_only):
        with pytest.raises(TypeError):
            kernels.outer_step(bad, good.copy(), good, 0.7, 0.9)  # pyrefly: ignore
        with pytest.raises(TypeError):
            kernels.outer_step(good.copy(), bad, good, 0.7, 0.9)  # pyrefly: ignore
    kernels.outer_step(good, good.copy(), read_only, 0.7, 0.9)
    with pytest.raises(ValueError, match=r"length of velocity is 7; anchor needs 8"):
        kernels.outer_step(good, good[:7].copy(), good.copy(), 0.7, 0.9)
